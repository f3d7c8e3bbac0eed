"""The element-wise maximum over all ranks, through a tiny all-reduce that nobody waits for.

It is begun in one call and read in a later one, in the same calls on every rank; so a rank that is in step with the
others waits for none of them, and the all-reduce may share a group with the collectives of training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchelastic.group.watched_group import WatchedGroup


class LaggedMax:
    """One maximum, which is begun by making this; waits for nobody. Used by one thread at a time, by all ranks in step.

    Args:
        group: whose ranks it is of.
        number: of this maximum; no other one of the group's user has it.
        values: tells the others these numbers, as many on every rank.

    Attributes:
        group: as given.
        number: as given.

    Raises:
        RuntimeError: the group is broken.
    """

    def __init__(self, group: WatchedGroup, number: int, values: Sequence[float]) -> None:
        self.group, self.number = group, number
        self._values = torch.tensor(values, dtype=torch.float64, device=group.device)
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group.group, async_op=True)

    def finish(self) -> list[float]:
        """The largest of each number over all ranks.

        Raises:
            RanksMissingError: a rank has not begun it within the time limit.
            RuntimeError: the group is broken, for example because a rank has died.
        """
        self.group.wait(self._work, f"maximum-{self.number}")
        return [float(value) for value in self._values.tolist()]
