"""Looks at the deadline together with the other ranks: now and then while it is far, in each iteration when near."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.lifetime.agreement import Agreement, Alone, GroupAgreement, present_world
from torchelastic.lifetime.bounds import Bound, guess, needed_samples
from torchelastic.lifetime.deadline import Deadline, Nearest
from torchelastic.lifetime.decision import StopDecision, Tier, decide, part_of_risk
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.manager_state import MAX_SAVES
from torchelastic.lifetime.outlook import NEAR_ITERATIONS, Outlook, interval_iterations

log = logging.getLogger(__name__)

#: What a save is taken to need while none was measured, and the user has said nothing.
UNKNOWN_SAVE_S = 10.0
#: A deadline that has moved away by more than this is a new one.
_MOVED_S = 1.0
#: So often per interval between looks the bounds are worked out anew while the deadline is near,
_REFRESHES = 10
#: and after so many iterations at most while it is far.
_FAR_REFRESH = 128


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

    def tiers(self, confidence: float) -> tuple[Tier, ...]:
        """What a decision needs to know."""
        return tuple(
            Tier.of(
                tier,
                times,
                confidence=confidence,
                if_unknown_s=self.at_least_s or UNKNOWN_SAVE_S,
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
        deadline: when to be done.
        decision: the last one that was taken near a deadline; None: it never came near one.
        stop: the decision to stop, once it is taken; None again if the deadline then moves away,
            or the group changes.
        confidence: that the save is done in time.
        earlier_bound_s: how long an iteration took at most in an earlier life; counts until one is measured.
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
        self.deadline, self._times, self._saves = deadline, times, saves
        self._reserve_s, self._timeout_s, self._clock = reserve_s, timeout_s, clock
        self.confidence, self._part = confidence, part_of_risk(confidence)
        self._is_given = agree is not None
        self.agree: Agreement = Alone() if agree is None else agree
        self.decision: StopDecision | None = None
        self.stop: StopDecision | None = None
        self.earlier_bound_s = 0.0
        self._world: Any = None
        self._world_size = self.agree.world_size
        self._is_near = False
        self._elapsed = 0
        self._refresh_at = 0
        self._interval, self._calm_above_s = 1, math.inf
        self._known: tuple[float, Bound | None, float] = (0.0, None, 0.0)

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
        self._is_near, self._elapsed, self._refresh_at = False, 0, 0
        self.stop = None  # a rank that has just come knows of none, and what was saved may have gone with another

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, by this rank's clock."""
        return self.deadline.remaining_s(self._clock())

    def deadline_text(self) -> str:
        """The nearest deadline, for people."""
        which = self.deadline.which(self._clock()) if isinstance(self.deadline, Nearest) else self.deadline
        return "none" if which is None else f"{which.name} ({which.reason})"

    def step_bound(self) -> Bound | None:
        """How much time to leave for the next iteration, as far as this rank knows."""
        view = self._times.view()
        return None if view is None else view.bound(1, self._part)

    def look(self, count: int, lived: int) -> tuple[int, int]:
        """Agree with the others, and decide if the deadline is near.

        Args:
            count: iterations of the run that are done.
            lived: iterations that have begun in this process.

        Returns:
            In how many iterations to look again, and how many iterations of the run are done: the most of all ranks.

        Raises:
            RankMissingError: a rank did not come.
        """
        if self.agree.is_alone and self._is_calm(lived):
            return self._interval, count
        own, before = self._outlook(count, lived), self.stop
        elapsed, self._elapsed = self._elapsed, 0
        # a rank that had begun nothing has to wait for the others, as they for it
        agreed = own.agreed(self.agree.finish()) if elapsed else self._together(own)
        self._interval, self._calm_above_s = agreed.interval, agreed.near_below_s(elapsed, self._reserve_s)
        is_near = self._is_armed(agreed) and agreed.remaining_s <= self._calm_above_s
        if is_near and not self._is_near:
            self._refresh_at = lived
            agreed = self._together(self._outlook(count, lived))
        if is_near:
            self._decide(agreed)
            is_near = self.stop is None
        self._is_near = is_near
        following = 1 if is_near else agreed.interval
        has_just_stopped = self.stop is not None and self.stop is not before
        # nothing is begun in the last iteration: a rank that leaves at once would break it for the others
        if not is_near and not has_just_stopped and not self.agree.is_alone:
            self.agree.begin(own.numbers())
            self._elapsed = following
        return following, agreed.count

    def _is_calm(self, lived: int) -> bool:
        """Whether nothing has to be worked out: the deadline is far by what was known a few iterations ago."""
        if self._is_near or self.stop is not None or self._is_stale(lived):
            return False
        remaining_s = self.deadline.remaining_s(self._clock())
        return remaining_s is None or remaining_s > self._calm_above_s

    def _together(self, own: Outlook) -> Outlook:
        if self.agree.is_alone:
            return own
        self.agree.begin(own.numbers())
        return own.agreed(self.agree.finish())

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
        decision = decide(agreed.remaining_s, agreed.step, agreed.tiers, reserve_s=self._reserve_s)
        self.decision = decision
        if decision.stops:
            self.stop = decision

    def _is_stale(self, lived: int) -> bool:
        """Whether the bounds have to be worked out: it is time, or the newest iteration was longer than all of them."""
        return lived >= self._refresh_at or self._times.newest_s > self._known[2]

    def _outlook(self, count: int, lived: int) -> Outlook:
        remaining_s = self.deadline.remaining_s(self._clock())
        if self._is_stale(lived):
            self._known = self._work_out()
            usual_s = self._known[0]
            # near the deadline of very short iterations it would cost more than they do
            every = interval_iterations(usual_s) // _REFRESHES if self._is_near else min(_FAR_REFRESH, lived // 4)
            self._refresh_at = lived + max(1, every)
        usual_s, step, far_s = self._known
        return Outlook(
            remaining_s=math.inf if remaining_s is None else remaining_s,
            usual_s=usual_s,
            step=step,
            far_s=far_s,
            interval=interval_iterations(usual_s),
            tiers=self._saves.tiers(self._part),
            count=count,
            lived=lived,
        )

    def _work_out(self) -> tuple[float, Bound | None, float]:
        """The usual iteration, and the slowest of the next, and of those until the look after the next."""
        view = self._times.view()
        if view is None:
            earlier = guess(self.earlier_bound_s, "none was measured: as in an earlier life", self._part)
            return 0.0, earlier if self.earlier_bound_s else None, self.earlier_bound_s
        interval = interval_iterations(view.usual_s)
        step = view.bound(1 + interval // _REFRESHES, self._part)
        far = view.bound(2 * interval + NEAR_ITERATIONS + _FAR_REFRESH, self._part)
        return view.usual_s, step, 0.0 if far is None else far.seconds
