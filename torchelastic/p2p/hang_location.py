"""The hang location of each member of a group that was aborted, exchanged in the next one, to name the outlier ranks.

Plain strings in the round's store: set by each rank before the group is formed, read after it was, so that no rank
waits. Nothing is executed, and invalid strings are ignored.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from torchelastic.p2p.stacks import MAX_WHERE
from torchelastic.text import escaped, listed

log = logging.getLogger(__name__)

_NOTICED = "hang/noticed"
#: For people: not all of 10,000.
MAX_RANKS = 8


@dataclass(frozen=True)
class HangLocation:
    """The location of one worker in its program.

    Attributes:
        rank: in the group that was aborted.
        step: committed steps, which is the number of the step that it was in.
        where: line and function of the user's program.
    """

    rank: int
    step: int
    where: str

    def encode(self) -> str:
        """As one line of text."""
        return f"{self.rank} {self.step} {escaped(self.where)[:MAX_WHERE]}"


def decode(text: str) -> HangLocation | None:
    """What `encode` wrote; None: it is something else.

    >>> decode(HangLocation(1, 8, "train.py:41 train_step").encode())
    HangLocation(rank=1, step=8, where='train.py:41 train_step')
    >>> decode("rubbish") is None
    True
    """
    match = re.fullmatch(r"(\d{1,7}) (\d{1,15}) (.*)", text)
    return None if match is None else HangLocation(int(match[1]), int(match[2]), escaped(match[3])[:MAX_WHERE])


def outliers(locations: Sequence[HangLocation]) -> tuple[HangLocation, ...]:
    """Those at another location than most; empty if all are at the same.

    Locations are equal if step and line are. Without a majority those furthest ahead are the outliers: a rank that
    skips a collective gets ahead of those that wait in it.

    >>> here, there = "train.py:52 train_step", "train.py:41 train_step"
    >>> [one.rank for one in outliers([HangLocation(0, 7, here), HangLocation(1, 8, there), HangLocation(2, 7, here)])]
    [1]
    """
    places: dict[tuple[int, str], list[HangLocation]] = defaultdict(list)
    for location in locations:
        places[location.step, location.where].append(location)
    if len(places) < 2:
        return ()
    most = max(len(group) for group in places.values())
    largest = [place for place, group in places.items() if len(group) == most]
    # of places with equally many, the one that is furthest behind is taken for that of the others
    usual = min(largest, key=lambda place: place[0])
    return tuple(location for location in locations if (location.step, location.where) != usual)


def describe(locations: Sequence[HangLocation]) -> str:
    """A sentence that names the outliers; empty if there are none.

    >>> describe([HangLocation(0, 7, "train.py:52 train_step"), HangLocation(1, 8, "train.py:41 train_step")])
    'rank 1 was in train.py:41 train_step (step 8), rank 0 in train.py:52 train_step (step 7)'
    """
    outlying = outliers(locations)
    if not outlying:
        return ""
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for location in (*outlying, *(location for location in locations if location not in outlying)):
        places[location.step, location.where].append(location.rank)
    parts = [f"{listed(ranks)} in {where} (step {step})" for (step, where), ranks in list(places.items())[:MAX_RANKS]]
    return ", ".join(parts).replace(" in ", " was in " if len(next(iter(places.values()))) == 1 else " were in ", 1)


def publish(store: Store, rank: int, location: HangLocation, has_noticed_hang: bool) -> None:
    """Before the group is formed: publish the location of this worker. Never waits."""
    store.set(_key(rank), location.encode())
    if has_noticed_hang:
        store.set(_NOTICED, "1")


def collect(store: Store, world_size: int) -> list[HangLocation]:
    """After the group was formed: the published locations; empty if no rank noticed a hang. Never waits.

    All were published before the group was formed, which needs all ranks.
    """
    if not store.check([_NOTICED]):
        return []
    keys = [_key(rank) for rank in range(world_size)]
    texts = [store.get(key)[: 2 * MAX_WHERE].decode(errors="replace") for key in keys if store.check([key])]
    return [location for location in map(decode, texts) if location is not None]


def log_outliers(locations: Sequence[HangLocation]) -> None:
    """Name the outliers when a group was aborted because of a hang."""
    named = describe(locations)
    if named:
        log.warning("when the group was aborted, %s", named)


def _key(rank: int) -> str:
    return f"hang/location/{rank}"
