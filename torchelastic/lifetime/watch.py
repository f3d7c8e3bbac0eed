"""Checks the deadline together with the other ranks: now and then while it is far, in each iteration when near.

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

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.lifetime.agreement import Agreement, Alone, GroupAgreement, present_world
from torchelastic.lifetime.bounds import Bound, needed_samples
from torchelastic.lifetime.deadline import Deadline, Nearest
from torchelastic.lifetime.deadline_monitor import CHECK_S, DeadlineMonitor
from torchelastic.lifetime.decision import TRIAL_BELOW_S, StopDecision, Tier, decide
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.manager_state import MAX_SAVES, ManagerState
from torchelastic.lifetime.outlook import Outlook

log = logging.getLogger(__name__)

#: A deadline that has moved away by more than this is a new one.
_MOVED_S = 1.0
#: What an exchange costs is the least of so many: on a busy machine some take long, and are no reason to decide seldom.
_EXCHANGES = 8


class SaveTimes:
    """How long saves took, by tier.

    Args:
        tiers: their names, the most durable first.
        at_least_s: what a bound is never below.

    Raises:
        ValueError: there are no tiers, one has no name, or two have the same.
    """

    def __init__(self, tiers: Sequence[str], at_least_s: float) -> None:
        if isinstance(tiers, str) or not tiers or not all(tiers) or len(set(tiers)) < len(tiers):
            raise ValueError(f"tiers is {tiers!r}: give the names of the tiers, each once, the most durable first")
        self.at_least_s = at_least_s
        self._times: dict[str, deque[float]] = {tier: deque(maxlen=MAX_SAVES) for tier in tiers}
        self._earlier: Mapping[str, Sequence[float]] = {}

    @property
    def times_s(self) -> Mapping[str, tuple[float, ...]]:
        """By tier, how long the newest saves took, oldest first."""
        return {tier: (*self._earlier.get(tier, ()), *times)[-MAX_SAVES:] for tier, times in self._times.items()}

    @property
    def first_tier(self) -> str:
        """The most durable."""
        return next(iter(self._times))

    def took(self, tier: str, seconds: float) -> None:
        """One more save. Raises ValueError: no such tier, or the time is negative, infinite or NaN."""
        if tier not in self._times:
            raise ValueError(f"there is no tier {tier!r}: the tiers are {', '.join(self._times)}")
        self._times[tier].append(real_number("seconds", seconds, remedy="give seconds, 0 or more"))

    def remember(self, times_s: Mapping[str, Sequence[float]]) -> None:
        """The saves of earlier lives, before those of this one; those to tiers that there are no more are left out."""
        self._earlier = {tier: tuple(times) for tier, times in times_s.items()}

    @property
    def may_be_tried(self) -> bool:
        """Whether a save may be made only to measure it: not where the user has said how long it takes."""
        return not self.at_least_s

    def tiers(self, confidence: float) -> tuple[Tier, ...]:
        """What a decision needs to know."""
        return tuple(
            Tier.of(
                tier,
                times,
                confidence=confidence,
                if_unknown_s=self.at_least_s or None,
                at_least_s=self.at_least_s,
            )
            for tier, times in self.times_s.items()
        )


class Watch:
    """The deadline of one process, watched together with the other ranks. On the training thread of every rank.

    Args:
        deadline: when to be done.
        times: of the iterations.
        saves: of the saves.
        reserve_s: to keep besides the bounds.
        confidence: that the save is done in time.
        timeout_s: for how long a rank is waited for.
        clock: monotonic seconds.
        agree: None: the default process group, as it is at the time; without one this process is alone.

    Raises:
        ValueError: the confidence is not above 0 and below 1.

    Attributes:
        monitor: of this rank's own deadline.
        decision: the last one that was taken near a deadline, or at a notice; None: there was none.
        stop: the decision to stop, once it is taken; None again if the deadline then moves away,
            or the group changes.
        save: the last decision to save, whether to stop then or to go on.
        confidence: that the save is done in time.
    """

    def __init__(
        self,
        deadline: Deadline,
        times: IterationTimes,
        saves: SaveTimes,
        *,
        reserve_s: float,
        confidence: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        agree: Agreement | None = None,
    ) -> None:
        needed_samples(confidence)  # complains if there is no such confidence
        self.monitor = DeadlineMonitor(deadline, times, confidence=confidence, clock=clock)
        self._times, self._saves = times, saves
        self._reserve_s, self._timeout_s, self._clock = reserve_s, timeout_s, clock
        self.confidence = confidence
        self._is_given = agree is not None
        self.agree: Agreement = Alone() if agree is None else agree
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
        self._recall()

    def _recall(self) -> None:
        state = self._remembered
        if state is None:
            return
        self.monitor.earlier_bound_s = state.iter_bound_s
        if state.world_size == self._world_size:
            self._times.remember(state.iter_times_s)

    def is_new_group(self) -> bool:
        """Whether the process group is another one than before: then `enter_group` has to follow."""
        return not self._is_given and present_world() is not self._world

    def enter_group(self) -> None:
        """From now on the ranks of the present process group agree. If they are more or fewer, times begin anew."""
        self._world = present_world()
        self.agree = Alone() if self._world is None else GroupAgreement(self._world, self._timeout_s)
        if self.agree.world_size != self._world_size:
            self._times.reset()
            self._world_size = self.agree.world_size
            self._recall()
        self._is_near = self._has_begun = self._has_met = False
        self._due_s, self._due_at = -math.inf, 0
        self.monitor.forget()
        # a rank that has just come knows of none, and what was saved may have gone with another
        self.save = self.stop = None

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, by this rank's clock; None: none is known."""
        left_s = self.monitor.remaining_s()
        return None if left_s == math.inf else left_s

    def deadline_text(self) -> str:
        """The nearest deadline, for people."""
        deadline = self.monitor.deadline
        which = deadline.which(self._clock()) if isinstance(deadline, Nearest) else deadline
        return "none" if which is None else f"{which.name} ({which.reason})"

    def step_bound(self) -> Bound | None:
        """How much time to leave for the next iteration, as far as this rank knows."""
        return self.monitor.step_bound()

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
            own = self._outlook(count, lived)
            near_below_s = self._near_below_s(own)
            self._decide_if_near(own, own.remaining_s <= near_below_s)
            far_s = CHECK_S if self.stop is not None else min(CHECK_S, own.remaining_s - near_below_s)
            self._due_s = -math.inf if self._is_near else self._clock() + far_s
            return count
        if self._has_met and not self._has_begun and not self._is_near:
            self._begin(self._outlook(count, lived))
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
            own = self._outlook(count, lived)
            self._decide_if_near(own, own.remaining_s <= self._near_below_s(own))
        return self.stop is not None

    def _check_together(self, count: int, lived: int) -> int:
        """Read what was begun an iteration before, or exchange it now; see `check`."""
        own, before = self._outlook(count, lived), self.stop
        agreed = own.agreed(self.agree.finish()) if self._has_begun else self._together(own)
        is_near = agreed.remaining_s <= self._near_below_s(agreed)
        if self._has_begun and (is_near or agreed.at_once_s < math.inf):
            agreed = self._together(self._outlook(count, lived))  # that was an iteration old
        self._has_met, self._has_begun = True, False
        self._decide_if_near(agreed, is_near)
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

    def _outlook(self, count: int, lived: int) -> Outlook:
        tiers = self._saves.tiers(self.monitor.part)
        return self.monitor.outlook(
            tiers, count=count, lived=lived, is_near=self._is_near, cost_s=min(self._costs_s, default=0.0)
        )

    def _begin(self, own: Outlook) -> None:
        began_s = self._clock()
        self.agree.begin(own.numbers())
        self._has_begun = True
        self._costs_s.append(2.0 * (self._clock() - began_s))  # to read it costs as much

    def _together(self, own: Outlook) -> Outlook:
        self.agree.begin(own.numbers())
        return own.agreed(self.agree.finish())

    def _near_below_s(self, agreed: Outlook) -> float:
        """With less time left than this there may be something to decide."""
        near_below_s = agreed.near_below_s(1, self._reserve_s)
        wants_trial = self._saves.may_be_tried and not self.monitor.has_tried
        is_unknown = not any(tier.is_measured for tier in agreed.tiers)
        return max(near_below_s, TRIAL_BELOW_S) if wants_trial and is_unknown else near_below_s

    def _decide_if_near(self, agreed: Outlook, is_near: bool) -> None:
        is_armed = self._is_armed(agreed)
        self._is_near = is_armed and (is_near or agreed.at_once_s < math.inf)
        if self._is_near:
            self._decide(agreed)
            self._is_near = self.stop is None

    def _is_armed(self, agreed: Outlook) -> bool:
        """Whether there is a deadline for which it has not stopped yet."""
        if self.stop is None:
            return True
        if agreed.remaining_s <= self.stop.numbers["remaining_s"] + _MOVED_S:
            return False
        log.warning("the deadline has moved away (%.3g s are left): there will be another save", agreed.remaining_s)
        self.stop = None
        return True

    def _decide(self, agreed: Outlook) -> None:
        if agreed.lived < 2:
            return  # nothing was trained yet: there is nothing to lose, and a job that is restarted must get on
        decision = decide(
            agreed.remaining_s,
            agreed.step,
            agreed.tiers,
            reserve_s=self._reserve_s,
            at_once_s=None if agreed.at_once_s == math.inf else agreed.at_once_s,
            may_try=self.monitor.may_try(agreed.tiers) if self._saves.may_be_tried else (),
        )
        self.decision = decision
        if decision.saves:
            self.save = decision
            self.monitor.saves(decision.tier)
        if decision.stops:
            self.stop = decision
