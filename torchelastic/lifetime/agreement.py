"""How all ranks come to the same numbers: the element-wise maximum, through a tiny all-reduce that nobody waits for.

It is begun in one iteration and read in a later one, in a gloo group of its own. A rank that does not come is named,
after a bounded wait.

torch is imported only when there is a process group, by which time the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.group.lagged_max import LaggedMax
    from torchelastic.group.watched_group import WatchedGroup


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


class SoloAgreement:
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
    """

    is_alone = False

    def __init__(self, source: dist.ProcessGroup, timeout_s: float) -> None:
        import torch.distributed as dist

        self._source, self._timeout_s = source, timeout_s
        self._rank, self.world_size = dist.get_rank(source), dist.get_world_size(source)
        self._group: WatchedGroup | None = None
        self._number = 0
        self._begun: LaggedMax | None = None

    @property
    def is_first(self) -> bool:
        """See `Agreement`."""
        return self._rank == 0

    def begin(self, values: Sequence[float]) -> None:
        """See `Agreement`; the first call waits for all ranks, and raises what `finish` does.

        Raises:
            ValueError: the ranks bring different numbers of numbers.
        """
        from torchelastic.group.lagged_max import LaggedMax

        with self._naming_the_missing():
            if self._group is None:
                self._group = self._formed(len(values))
            self._number += 1
            self._begun = LaggedMax(self._group, self._number, values)

    def finish(self) -> list[float]:
        """See `Agreement`."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise RuntimeError("nothing was begun that could be finished")
        with self._naming_the_missing():
            return begun.finish()

    def _formed(self, numbers: int) -> WatchedGroup:
        from torchelastic.group.watched_group import WatchedGroup

        group, others = WatchedGroup.formed(self._source, self._timeout_s, value=numbers)
        if different := [rank for rank, number in enumerate(others) if number != numbers]:
            raise ValueError(
                f"rank {different[0]} brings {others[different[0]]} numbers, and rank {self._rank} {numbers}: give the "
                "IterManager of every rank the same tiers"
            )
        return group

    @contextmanager
    def _naming_the_missing(self) -> Iterator[None]:
        from torchelastic.group.watched_group import RanksMissingError

        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RanksMissingError):
                missing, when = error, f"within {self._timeout_s:g} s"
            else:
                missing = RanksMissingError([] if self._group is None else self._group.lost())
                when = f"a connection was lost: {next(iter(str(error).splitlines()), '')}"
            raise RankMissingError(
                f"{missing} to agreement {self._number} on when to save ({when}): all ranks have to call "
                "IterManager.iter() in every iteration; or its process has ended or hangs"
            ) from error
