"""How all ranks come to the same numbers: the element-wise maximum, through a tiny all-reduce that nobody waits for.

It is begun in one iteration and read in a later one, in a gloo group of its own, never mixed up with the collectives of
training. A rank that does not come is named, after a bounded wait.

torch is imported only when there is a process group, by which time the program has imported it.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_POLL_S, _SLOW_POLL_S = 0.0002, 0.01
#: A rank that waits longer than this says so in the store, for those who ask who is missing.
_MARK_AFTER_S = 0.5
#: How long the others are given to say so too, once a connection has broken.
_GRACE_S = 2.0
_NAMED_RANKS = 8

#: How often the ranks of each group of the program have met: part of the key under which they find each other.
_meetings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class RankMissingError(RuntimeError):
    """A rank did not take part in an agreement: it did not come in time, or its process has ended; names it."""


class Agreement(Protocol):
    """Gives all ranks the same numbers. Every rank calls the same methods in the same order, on one thread.

    Attributes:
        is_alone: whether there is nobody to agree with.
        is_first: whether this is the rank that writes files and lines for people.
        world_size: how many ranks there are.
    """

    @property
    def is_alone(self) -> bool: ...  # noqa: D102 - see above

    @property
    def is_first(self) -> bool: ...  # noqa: D102

    @property
    def world_size(self) -> int: ...  # noqa: D102

    def begin(self, values: Sequence[float]) -> None:
        """Tell the others these numbers, as many on every rank; does not wait for them."""

    def finish(self) -> list[float]:
        """Of what was begun last, the largest of each number over all ranks.

        Raises:
            RankMissingError: a rank has not begun it within the time limit.
        """


class Alone:
    """One process, which agrees with itself."""

    is_alone, is_first, world_size = True, True, 1

    def __init__(self) -> None:
        self._values: list[float] = []

    def begin(self, values: Sequence[float]) -> None:
        """See `Agreement`."""
        self._values = list(values)

    def finish(self) -> list[float]:
        """See `Agreement`."""
        return self._values


def present_world() -> dist.ProcessGroup | None:
    """The default process group of this process; None if there is none, or torch was not even imported."""
    distributed = sys.modules.get("torch.distributed")
    group = getattr(distributed, "group", None)  # None: torch was built without it
    return None if group is None else group.WORLD


class GroupAgreement:
    """The ranks of a process group. They meet, and make a gloo group, at the first `begin`.

    Args:
        source: whose ranks agree, all of them.
        timeout_s: for how long a rank is waited for.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    is_alone = False

    def __init__(
        self,
        source: dist.ProcessGroup,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        self._torch, self._dist, self._store_of = torch, dist, distributed_c10d._get_default_store
        self._source, self._timeout_s, self._clock, self._sleep = source, timeout_s, clock, sleep
        self._rank, self.world_size = dist.get_rank(source), dist.get_world_size(source)
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._words: torch.Tensor | None = None
        self._round = 0
        self._meeting = 0

    @property
    def is_first(self) -> bool:
        """See `Agreement`."""
        return self._rank == 0

    def begin(self, values: Sequence[float]) -> None:
        """See `Agreement`; the first call waits for all ranks, and raises what `finish` does.

        Raises:
            ValueError: the ranks bring different numbers of numbers.
        """
        group = self._group if self._group is not None else self._meet(len(values))
        self._round += 1
        self._words = self._torch.tensor(values, dtype=self._torch.float64)
        try:
            self._work = self._dist.all_reduce(self._words, op=self._dist.ReduceOp.MAX, group=group, async_op=True)
        except RuntimeError as error:
            self._raise_broken(error)

    def finish(self) -> list[float]:
        """See `Agreement`."""
        if self._work is None or self._words is None:
            raise RuntimeError("nothing was begun that could be finished")
        work, self._work = self._work, None
        began_s, is_marked = self._clock(), False
        while not work.is_completed():
            waited_s = self._clock() - began_s
            if not is_marked and waited_s >= min(_MARK_AFTER_S, self._timeout_s / 2):
                is_marked = True
                self._mark()
            if waited_s >= self._timeout_s:
                self._raise_missing(f"within {self._timeout_s:g} s")
            self._sleep(_POLL_S if waited_s < 0.1 else _SLOW_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_broken(error)
        return [float(word) for word in self._words.tolist()]

    def _meet(self, numbers: int) -> dist.ProcessGroup:
        """Waits in the store, where a rank that does not come can be named; then makes the gloo group."""
        _meetings[self._source] = self._meeting = _meetings.get(self._source, 0) + 1
        self._mark(str(numbers))
        began_s = self._clock()
        while self._missing():
            if self._clock() - began_s >= self._timeout_s:
                self._raise_missing(f"within {self._timeout_s:g} s")
            self._sleep(_SLOW_POLL_S)
        others = {rank: int(self._store_of().get(self._key(rank))) for rank in range(self.world_size)}
        if different := [rank for rank, number in others.items() if number != numbers]:
            raise ValueError(
                f"rank {different[0]} brings {others[different[0]]} numbers, and rank {self._rank} {numbers}: give the "
                "IterManager of every rank the same tiers"
            )
        self._group = self._dist.new_group(
            self._dist.get_process_group_ranks(self._source),
            timeout=timedelta(seconds=2 * self._timeout_s + 1),  # not before `finish` has named who is missing
            backend="gloo",
        )
        return self._group

    # --- who is missing -----------------------------------------------------------------------------------------------

    def _key(self, rank: int) -> str:
        return f"torchelastic.lifetime/{self._source.group_name}/{self._meeting}/{self._round}/{rank}"

    def _mark(self, said: str = "1") -> None:
        self._store_of().set(self._key(self._rank), said)

    def _missing(self) -> list[int]:
        store = self._store_of()
        return [rank for rank in range(self.world_size) if not store.check([self._key(rank)])]

    def _raise_missing(self, when: str) -> None:
        missing = self._missing()
        names = ", ".join(map(str, missing[:_NAMED_RANKS])) + (", .." if len(missing) > _NAMED_RANKS else "")
        who = f"rank{'s' * (len(missing) > 1)} {names}" if missing else "another rank"
        raise RankMissingError(
            f"{who} did not come to agreement {self._round} on when to save ({when}): all ranks have to call "
            "IterManager.iter() in every iteration; or its process has ended or hangs"
        )

    def _raise_broken(self, error: RuntimeError) -> None:
        """A connection was lost: whoever is still there says so in the store."""
        first_line = next(iter(str(error).splitlines()), "")
        try:
            self._mark()
            began_s = self._clock()
            while len(self._missing()) > 1 and self._clock() - began_s < min(_GRACE_S, self._timeout_s):
                self._sleep(_SLOW_POLL_S)
            self._raise_missing(f"a connection was lost: {first_line}")
        except RankMissingError as missing:
            raise missing from error
        except RuntimeError:  # the store has gone with the rank that held it
            raise RankMissingError(
                f"a rank was lost during agreement {self._round} on when to save, and rank 0, which keeps the store, "
                f"does not answer: {first_line}"
            ) from error
