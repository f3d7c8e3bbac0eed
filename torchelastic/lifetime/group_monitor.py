"""Watches a deadline together with the ranks of a process group: now and then while it is far, else each iteration.

A process that is alone goes by its clock. Several ranks have to exchange what they know in the same iteration, so they
agree on its number; how soon it comes follows from what the exchange costs beside an iteration.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchelastic.lifetime.agreement import Agreement, GroupAgreement, SoloAgreement, present_world
from torchelastic.lifetime.deadline import Nearest
from torchelastic.lifetime.deadline_monitor import CHECK_S, DeadlineMonitor
from torchelastic.lifetime.decision import StopDecision
from torchelastic.lifetime.early_stop import Lifetime
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.manager_state import ManagerState
from torchelastic.lifetime.sample import Sample

log = logging.getLogger(__name__)

#: A deadline that has moved away by more than this is a new one.
_MOVED_S = 1.0
#: What an exchange costs is the least of so many: on a busy machine some take long, and are no reason to decide seldom.
_EXCHANGES = 8


class GroupMonitor(DeadlineMonitor):
    """The deadline of all ranks of a process group. On the training thread of every rank.

    Args:
        deadline, times, save_times_s, settings, least_save_s, clock: see `DeadlineMonitor`.
        timeout_s: for how long a rank is waited for.
        agree: None: the default process group, as it is at the time; without one this process is alone.

    Attributes:
        agree: how the ranks of the present group agree.
        decision: the last one that was taken near a deadline, or at a notice; None: there was none.
        stop: the decision to stop, once it is taken; None again if the deadline then moves away, or the group changes.
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
        agree: Agreement | None = None,
    ) -> None:
        super().__init__(deadline, times, save_times_s, settings, least_save_s=least_save_s, clock=clock)
        self._timeout_s, self._is_given = timeout_s, agree is not None
        self.agree: Agreement = SoloAgreement() if agree is None else agree
        self.decision: StopDecision | None = None
        self.stop: StopDecision | None = None
        self.save: StopDecision | None = None
        self._remembered: ManagerState | None = None
        self._world: Any = None
        self._world_size = self.agree.world_size
        self._is_near = self._has_begun = self._has_met = False
        self._due_s, self._due_at = -math.inf, 0
        self._costs_s: deque[float] = deque(maxlen=_EXCHANGES)

    def remember(self, state: ManagerState) -> None:
        """What an earlier life of the job knew of its iterations, if it had as many ranks."""
        self._remembered = state
        self.earlier_bound_s, self.is_step_tried = state.iter_bound_s, state.is_step_tried
        if state.world_size == self._world_size:
            self._times.remember(state.iter_times_s)

    def follow_group(self) -> bool:
        """From now on the ranks of the present process group agree; whether it is another one than before."""
        if self._is_given or present_world() is self._world:
            return False
        self._world = present_world()
        self.agree = SoloAgreement() if self._world is None else GroupAgreement(self._world, self._timeout_s)
        is_of_other_size = self.agree.world_size != self._world_size
        self.enter_group(self.agree.world_size)
        if is_of_other_size and self._remembered is not None:
            self.remember(self._remembered)
        self._is_near = self._has_begun = self._has_met = False
        self._due_s, self._due_at = -math.inf, 0
        # a rank that has just come knows of none, and what was saved may have gone with another
        self.save = self.stop = None
        return True

    def is_due(self, now_s: float, calls: int) -> bool:
        """Whether to `check` now: by the clock if this process is alone, else by the iteration that was agreed on.

        Args:
            now_s: the present, by the clock.
            calls: iterations that have begun in this process.
        """
        return now_s >= self._due_s if self.agree.is_alone else calls >= self._due_at

    def check(self, count: int, lived: int) -> int:
        """Agree with the others, and decide if the deadline is near.

        Args:
            count: iterations of the run that are done.
            lived: iterations that have begun in this process.

        Returns:
            How many iterations of the run are done: the most of all ranks, where they have just said so.

        Raises:
            RankMissingError: a rank did not come.
        """
        if self.agree.is_alone:
            self._decide_if_near(self._own(count, lived))
            self._due_s = -math.inf if self._is_near else self._clock() + CHECK_S
            return count
        if self._has_met and not self._has_begun and not self._is_near:
            self._begin(self._own(count, lived))
            self._due_at = lived + 1
            return count
        return self._check_together(count, lived)

    def stops_after_save(self, count: int, lived: int) -> bool:
        """A save after which to go on was made: whether there is no time for that. Several ranks see it a step later.

        Args:
            count: see `check`.
            lived: see `check`.
        """
        if self.agree.is_alone:
            self._decide_if_near(self._own(count, lived))
        return self.stop is not None

    def _check_together(self, count: int, lived: int) -> int:
        """Read what was begun an iteration before, or exchange it now; see `check`."""
        own, before = self._own(count, lived), self.stop
        agreed = own.agreed(self.agree.finish()) if self._has_begun else self._together(own)
        if self._has_begun and self.is_near(agreed):
            agreed = self._together(self._own(count, lived))  # that was an iteration old
        self._has_met, self._has_begun = True, False
        self._decide_if_near(agreed)
        has_just_stopped = self.stop is not None and self.stop is not before
        if self._is_near:
            self._due_at = lived + 1
        elif has_just_stopped or agreed.interval > 1:
            # nothing is begun in the last iteration: a rank that leaves at once would break it for the others
            self._due_at = lived + max(1, agreed.interval - 1)
        else:
            self._begin(own)
            self._due_at = lived + 1
        return agreed.count

    def _own(self, count: int, lived: int) -> Sample:
        cost_s = min(self._costs_s, default=0.0)
        return self.sample(count=count, lived=lived, is_near=self._is_near, cost_s=cost_s)

    def _begin(self, own: Sample) -> None:
        began_s = self._clock()
        self.agree.begin(own.numbers())
        self._has_begun = True
        self._costs_s.append(2.0 * (self._clock() - began_s))  # to read it costs as much

    def _together(self, own: Sample) -> Sample:
        self.agree.begin(own.numbers())
        return own.agreed(self.agree.finish())

    def _decide_if_near(self, agreed: Sample) -> None:
        self._is_near = self._is_armed(agreed) and self.is_near(agreed)
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
        self.decision = self.plan(agreed).decision
        if self.decision.saves:
            self.save = self.decision
        if self.decision.stops:
            self.stop = self.decision
