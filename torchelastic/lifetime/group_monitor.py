"""The deadline of all ranks of a process group, and how they agree on it: rarely while it is far, else each iteration.

A process that is alone samples by its clock. Several ranks have to exchange what they know in the same iteration, so
they agree on its number; how soon it comes follows from the cost of an exchange relative to an iteration.

torch is imported only when there is a process group, by which time the program has imported it.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchelastic.error_text import in_one_line
from torchelastic.lifetime.deadline import Nearest
from torchelastic.lifetime.deadline_monitor import CHECK_S, DeadlineMonitor, Lifetime
from torchelastic.lifetime.decision import StopDecision, careful
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.sample import Sample

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.group.messages import LaggedMax
    from torchelastic.group.watched_group import WatchedGroup
    from torchelastic.lifetime.manager_state import ManagerState

log = logging.getLogger(__name__)

#: A deadline that has moved away by more than this is a new one.
_MOVED_S = 1.0
#: The cost of an exchange is the least of so many: on a busy machine some take long, which is no reason to sample less.
_EXCHANGES = 8


class RankMissingError(RuntimeError):
    """A rank did not take part in an agreement: it timed out, or its process has ended; the message names it."""


class GroupAgreement:
    """The element-wise maximum over the ranks of a process group: a tiny all-reduce, in a gloo group of its own.

    It is begun in one iteration and read in a later one, so that no rank waits. The first `begin` makes the group.
    Every rank calls the same methods in the same order, on one thread.

    Args:
        source: whose ranks agree, all of them.
        timeout_s: after which a missing rank is an error.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, source: dist.ProcessGroup, timeout_s: float) -> None:
        import torch.distributed as dist

        self._source, self._timeout_s = source, timeout_s
        self.rank, self.world_size = dist.get_rank(source), dist.get_world_size(source)
        self._group: WatchedGroup | None = None
        self._number = 0
        self._begun: LaggedMax | None = None

    def begin(self, values: Sequence[float]) -> None:
        """Begins the maximum of these numbers, as many on every rank; only the first call waits for the others.

        Raises:
            RankMissingError: see `finish`.
            ValueError: the ranks give different numbers of values.
        """
        from torchelastic.group.messages import LaggedMax

        with self._naming_the_missing():
            if self._group is None:
                self._group = self._formed(len(values))
            self._number += 1
            self._begun = LaggedMax(self._group, self._number, values)

    def finish(self) -> list[float]:
        """Of what was begun last, the largest of each number over all ranks.

        Raises:
            RankMissingError: a rank has not begun it within the time limit, or its process has ended; names it.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        with self._naming_the_missing():
            return begun.finish()

    def _formed(self, numbers: int) -> WatchedGroup:
        from torchelastic.group.watched_group import WatchedGroup

        group, others = WatchedGroup.formed(self._source, self._timeout_s, value=numbers)
        if different := [rank for rank, number in enumerate(others) if number != numbers]:
            raise ValueError(
                f"rank {different[0]} has {others[different[0]]} numbers, and rank {self.rank} {numbers}: give the "
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
                when = f"a connection was lost: {in_one_line(error)}"
            raise RankMissingError(
                f"{missing} to agreement {self._number} on when to save ({when}): all ranks have to call "
                "IterManager.iter() in every iteration; or its process has ended or hangs"
            ) from error


class GroupMonitor(DeadlineMonitor):
    """The deadline of all ranks of a process group. On the training thread of every rank.

    Args:
        deadline, times, save_times_s, settings, least_save_s, clock: see `DeadlineMonitor`.
        timeout_s: after which a missing rank is an error.

    Attributes:
        decision: the last one near a deadline, or at a notice; None: there was none.
        stop: the decision to stop; None again if the deadline then moves away, or the group changes.
        save: the last decision to save, whether to stop then or to go on.
    """

    def __init__(
        self,
        deadline: Nearest,
        times: IterationTimes,
        save_times_s: Callable[[], Mapping[str, Sequence[float]]],
        settings: Lifetime,
        *,
        least_save_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(deadline, times, save_times_s, settings, least_save_s=least_save_s, clock=clock)
        self._timeout_s = timeout_s
        self._agree: GroupAgreement | None = None
        self.decision: StopDecision | None = None
        self.stop: StopDecision | None = None
        self.save: StopDecision | None = None
        self._remembered: ManagerState | None = None
        self._careful_below_s = 0.0
        self._world: Any = None
        self._is_near = self._has_begun = self._has_met = False
        self._due_s, self._due_at = -math.inf, 0
        self._costs_s: deque[float] = deque(maxlen=_EXCHANGES)

    def remember(self, state: ManagerState) -> None:
        """Use the times of an earlier attempt of the job, if it had as many ranks."""
        self._remembered = state
        self.is_step_tried, self._careful_below_s = state.is_step_tried, state.careful_below_s
        if state.world_size == self.world_size:
            self._times.remember(state.iter_times_s)

    def follow_group(self) -> bool:
        """Use the present process group from now on; returns whether it is another one than before.

        Without a process group this process is alone.
        """
        # None: torch was not imported, or was built without it, or there is no process group
        world = getattr(getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None)
        if world is self._world:
            return False
        self._world = world
        self._agree = None if world is None else GroupAgreement(world, self._timeout_s)
        world_size = 1 if self._agree is None else self._agree.world_size
        is_of_other_size = world_size != self.world_size
        self.enter_group(world_size)
        if is_of_other_size and self._remembered is not None:
            self.remember(self._remembered)
        self._is_near = self._has_begun = self._has_met = False
        self._due_s, self._due_at = -math.inf, 0
        # a new rank knows of none, and what was saved may have been lost with another rank
        self.save = self.stop = None
        return True

    def is_due(self, now_s: float, calls: int) -> bool:
        """Whether to `check` now: by the clock if this process is alone, else by the iteration that was agreed on.

        `calls` are the iterations that have begun in this process.
        """
        return now_s >= self._due_s if self._agree is None else calls >= self._due_at

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and lines for people."""
        return self._agree is None or self._agree.rank == 0

    def check(self, count: int, lived: int) -> int:
        """Agree with the others, and decide if the deadline is near.

        Args:
            count: iterations of the run that are done.
            lived: iterations that have begun in this process.

        Returns:
            How many iterations of the run are done: after an exchange the maximum over the ranks.

        Raises:
            RankMissingError: a rank timed out.
        """
        if self._agree is None:
            self._decide_if_near(self._own(count, lived))
            self._due_s = -math.inf if self._is_near else self._clock() + CHECK_S
            return count
        if self._has_met and not self._has_begun and not self._is_near:
            self._begin(self._agree, self._own(count, lived))
            self._due_at = lived + 1
            return count
        return self._check_together(self._agree, count, lived)

    def stops_after_save(self, count: int, lived: int) -> bool:
        """After a save to go on: whether there is no time to. Several ranks know a step later. Arguments: `check`."""
        if self._agree is None:
            self._decide_if_near(self._own(count, lived))
        return self.stop is not None

    def summary(self) -> list[str]:
        """The deadline and the last decision to save, in lines for people."""
        left_s = self.remaining_s()
        lines = [f"deadline: {self.deadline_text()}" + (f", in {left_s:.1f} s" if left_s < math.inf else "")]
        if self.decision is not None and self.decision.stops:
            lines.append(f"decision: {self.decision}")
        return lines

    def _check_together(self, agree: GroupAgreement, count: int, lived: int) -> int:
        """Read what was begun an iteration before, or exchange it now; see `check`."""
        own, before = self._own(count, lived), self.stop
        if not self._has_begun:
            agree.begin(own.numbers())
        agreed = own.agreed(agree.finish())
        if self._has_begun and self.is_near(agreed):
            own = self._own(count, lived)  # that was an iteration old
            agree.begin(own.numbers())
            agreed = own.agreed(agree.finish())
        self._has_met, self._has_begun = True, False
        self._decide_if_near(agreed)
        has_just_stopped = self.stop is not None and self.stop is not before
        if self._is_near:
            self._due_at = lived + 1
        elif has_just_stopped or agreed.interval > 1:
            # nothing is begun in the last iteration: a rank that leaves at once would break it for the others
            self._due_at = lived + max(1, agreed.interval - 1)
        else:
            self._begin(agree, own)
            self._due_at = lived + 1
        return agreed.count

    def _own(self, count: int, lived: int) -> Sample:
        cost_s = min(self._costs_s, default=0.0)
        own = self.sample(count=count, lived=lived, is_near=self._is_near, cost_s=cost_s)
        return replace(own, careful_below_s=self._careful_below_s)

    def _begin(self, agree: GroupAgreement, own: Sample) -> None:
        began_s = self._clock()
        agree.begin(own.numbers())
        self._has_begun = True
        self._costs_s.append(2.0 * (self._clock() - began_s))  # to read it costs as much

    def _decide_if_near(self, agreed: Sample) -> None:
        is_near = self.is_near(agreed) or agreed.remaining_s <= agreed.careful_below_s
        self._is_near = self._is_armed(agreed) and is_near
        if self._is_near:
            self._decide(agreed)
            self._is_near = self.stop is None

    def _is_armed(self, agreed: Sample) -> bool:
        """Whether there is a deadline for which it has not stopped yet."""
        if self.stop is None:
            return True
        if agreed.remaining_s <= self.stop.numbers["remaining_s"] + _MOVED_S:
            return False
        log.warning("the deadline has moved away (%.3g s are left): there will be another save", agreed.remaining_s)
        self.stop = None
        return True

    def _decide(self, agreed: Sample) -> None:
        if agreed.lived < 2:
            return  # nothing was trained yet: there is nothing to lose, and a job that is restarted must get on
        self.decision = careful(self.plan(agreed).decision, agreed.careful_below_s, may_go_on=self._may_try())
        if self.decision.saves:
            self.save, self._careful_below_s = self.decision, 0.0
        if self.decision.stops:
            self.stop = self.decision
