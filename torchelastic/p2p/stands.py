"""Where each member of a group stood when it was given up: told to each other in the next one, to name the odd one out.

Plain strings in the round's store: set by each before the group is formed, read by rank 0 after it was, so that nobody
waits for anybody. Nothing is executed, and what does not fit is ignored.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from torchelastic.group.naming import listed
from torchelastic.p2p.stacks import MAX_WHERE
from torchelastic.text import escaped

log = logging.getLogger(__name__)

_NOTICED = "hang/noticed"
#: For people: not all of 10,000.
MAX_RANKS = 8


@dataclass(frozen=True)
class Stand:
    """Where a worker was.

    Attributes:
        rank: in the group that was given up.
        step: committed steps, which is the number of the step that it was in.
        where: line and function of the user's program.
    """

    rank: int
    step: int
    where: str

    def encode(self) -> str:
        """As one line of text."""
        return f"{self.rank} {self.step} {escaped(self.where)[:MAX_WHERE]}"


def decode(text: str) -> Stand | None:
    """What `encode` wrote; None: it is something else.

    >>> decode(Stand(1, 8, "train.py:41 train_step").encode())
    Stand(rank=1, step=8, where='train.py:41 train_step')
    >>> decode("rubbish") is None
    True
    """
    match = re.fullmatch(r"(\d{1,7}) (\d{1,15}) (.*)", text)
    return None if match is None else Stand(int(match[1]), int(match[2]), escaped(match[3])[:MAX_WHERE])


def odd_ones(stands: Sequence[Stand]) -> tuple[Stand, ...]:
    """Those who stood elsewhere than most; empty if all stood at one place.

    Most is decided by step and line. Where no place has more than the others, those furthest ahead are the odd ones:
    whoever skips a collective gets ahead of who waits in it.

    >>> here, there = "train.py:52 train_step", "train.py:41 train_step"
    >>> [odd.rank for odd in odd_ones([Stand(0, 7, here), Stand(1, 8, there), Stand(2, 7, here)])]
    [1]
    """
    places: dict[tuple[int, str], list[Stand]] = defaultdict(list)
    for stand in stands:
        places[stand.step, stand.where].append(stand)
    if len(places) < 2:
        return ()
    most = max(len(group) for group in places.values())
    largest = [place for place, group in places.items() if len(group) == most]
    # of places with equally many, the one that is furthest behind is taken for that of the others
    usual = min(largest, key=lambda place: place[0])
    return tuple(stand for stand in stands if (stand.step, stand.where) != usual)


def describe(stands: Sequence[Stand]) -> str:
    """A sentence that names the odd ones; empty if there are none.

    >>> describe([Stand(0, 7, "train.py:52 train_step"), Stand(1, 8, "train.py:41 train_step")])
    'rank 1 was in train.py:41 train_step (step 8), rank 0 in train.py:52 train_step (step 7)'
    """
    odd = odd_ones(stands)
    if not odd:
        return ""
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for stand in (*odd, *(stand for stand in stands if stand not in odd)):
        places[stand.step, stand.where].append(stand.rank)
    parts = [f"{listed(ranks)} in {where} (step {step})" for (step, where), ranks in list(places.items())[:MAX_RANKS]]
    return ", ".join(parts).replace(" in ", " was in " if len(next(iter(places.values()))) == 1 else " were in ", 1)


def tell(store: Store, rank: int, stand: Stand, has_noticed_hang: bool) -> None:
    """Before the group is formed: leave word of where this worker was. Asks nobody to wait."""
    store.set(_key(rank), stand.encode())
    if has_noticed_hang:
        store.set(_NOTICED, "1")


def ask(store: Store, world_size: int) -> list[Stand]:
    """After the group was formed: where those were who have left word; empty if nobody noticed a hang. Never waits.

    All words were left before the group was formed, which needs everybody.
    """
    if not store.check([_NOTICED]):
        return []
    keys = [_key(rank) for rank in range(world_size)]
    texts = [store.get(key)[: 2 * MAX_WHERE].decode(errors="replace") for key in keys if store.check([key])]
    return [stand for stand in map(decode, texts) if stand is not None]


def log_odd_ones(stands: Sequence[Stand]) -> None:
    """Name those who stood elsewhere than most when a group was given up because of a hang."""
    named = describe(stands)
    if named:
        log.warning("when the group was given up, %s", named)


def _key(rank: int) -> str:
    return f"hang/stand/{rank}"
