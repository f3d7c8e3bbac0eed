"""The deadline engine of one rank: samples what the rank knows, and decides from what all ranks know.

The train loop (`loop_lifetime`) and `IterManager` (`group_monitor`) both use it. They differ in how the ranks exchange
what they know, and in what they do about a decision.

Iterations may become a hundred times as long at any moment, so nothing here is due after a number of them alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number, whole_number
from torchelastic.checkpoint.policy.costs import Bound, needed_samples
from torchelastic.lifetime.deadline import Deadline, Nearest, nearest, unsure_since_s
from torchelastic.lifetime.decision import TRIAL_BELOW_S, SaveTarget, part_of_risk
from torchelastic.lifetime.drain_policy import StopPlan, near_below_s, plan_stop
from torchelastic.lifetime.grace import SHORTEST_GRACE_S
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.sample import NEAR_ITERATIONS, Sample, interval_steps

#: Seconds between two samples of a deadline while it is far.
CHECK_S = 0.1
#: The bounds of iterations are valid for so long near the deadline,
_VALID_NEAR_S = 0.05
#: for such a fraction of the time that is left while it is far, within these limits; never after a longer iteration.
_VALID_FRACTION, _MIN_VALID_S, _MAX_VALID_S = 0.02, 1.0, 30.0
#: Schedulers signal every process of a job, and not all ranks receive it at once: a save that answers a notice also
#: answers those that come so much later.
_SAME_NOTICE_S = 5.0
#: The only tier where there is none.
_NO_TIER = "nothing: there is no checkpoint manager"


@dataclass(frozen=True)
class Lifetime:
    """How `torchelastic.train(..., lifetime=)` meets deadlines; "auto" is `Lifetime()`.

    Args:
        reserve_s: seconds to keep besides the bounds of a step and a save, for what is not measured: the end of
            processes, the launcher, a slow file system.
        confidence: that the save is done in time, above 0 and below 1.
        deadline: when this process has to end; None: the nearest of `sources.detect()`.
        max_restarts: a SLURM job that was started again so often is not requeued any more.
        unknown_save_s: how long a save takes while none was measured; None: `decision.guess_save_s` of the tier.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """

    reserve_s: float = 5.0
    confidence: float = 0.99
    deadline: Deadline | None = None
    max_restarts: int = 100
    unknown_save_s: float | None = None

    def __post_init__(self) -> None:
        real_number("reserve_s", self.reserve_s, remedy="give seconds, 0 or more")
        if self.unknown_save_s is not None:
            real_number("unknown_save_s", self.unknown_save_s, remedy="give seconds, 0 or more")
        whole_number("max_restarts", self.max_restarts, at_least=0, remedy="give a number, 0 or more")
        needed_samples(self.confidence)  # raises if there is no such confidence
        nearest([self.deadline])  # raises if it is none


def lifetime_of(given: object) -> Lifetime:
    """What the argument `lifetime` of `train` means. Raises TypeError for anything but "auto" and a `Lifetime`."""
    if given == "auto":
        return Lifetime()
    if not isinstance(given, Lifetime):
        raise TypeError(f'lifetime is {given!r}: give "auto", a torchelastic.lifetime.Lifetime, or None')
    return given


class DeadlineMonitor:
    """On the training thread of one rank.

    Args:
        deadline: when to be done.
        times: of the iterations.
        save_times_s: returns by tier, the most durable first, how long its newest saves took.
        settings: for reserve, confidence, and how long an unknown save takes.
        least_save_s: least bound of a save. Above 0: no save is made only to measure it.
        trial_below_s: see `decision.decide`.
        clock: monotonic seconds; that of the deadline.

    Attributes:
        deadline: when to be done.
        world_size: number of ranks.
        is_step_tried: an iteration was begun only to measure it, here or in an earlier attempt.
    """

    def __init__(
        self,
        deadline: Nearest,
        times: IterationTimes,
        save_times_s: Callable[[], Mapping[str, Sequence[float]]],
        settings: Lifetime,
        *,
        least_save_s: float = 0.0,
        trial_below_s: float = TRIAL_BELOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline, self.is_step_tried = deadline, False
        self._times, self._save_times_s, self._clock = times, save_times_s, clock
        # the confidence of each bound, so that all of them together hold with the one that was asked for
        self._reserve_s, self._part = settings.reserve_s, part_of_risk(settings.confidence)
        self._unknown_save_s, self._least_save_s = settings.unknown_save_s, least_save_s
        self._trial_below_s = trial_below_s
        self.world_size = 1
        self._answered_s = -math.inf
        self._tried: set[str] = set()
        self._saved_at = self._tried_at = -1  # by the iterations that had begun
        self._known: tuple[float, Bound | None, float] = (0.0, None, 0.0)
        self._stale_at_s, self._stale_at_count, self._is_for_near = -math.inf, 0, False

    def enter_group(self, world_size: int) -> None:
        """The group has changed: new members know of no save; with another size, times are measured anew."""
        if world_size != self.world_size:
            self._times.reset()
            self.is_step_tried = False
        self.world_size = world_size
        self._tried.clear()
        self._saved_at = self._tried_at = -1
        self._answered_s, self._stale_at_s = -math.inf, -math.inf

    # --- what this rank knows -----------------------------------------------------------------------------------------

    def remaining_s(self) -> float:
        """Seconds until the deadline; infinite: none is known."""
        left_s = self.deadline.remaining_s(self._clock())
        return math.inf if left_s is None else left_s

    def deadline_text(self, if_none: str = "none") -> str:
        """The nearest deadline, for people."""
        which = self.deadline.which(self._clock())
        return if_none if which is None else f"{which.name} ({which.reason})"

    def tiers(self) -> tuple[SaveTarget, ...]:
        """The places to save to, the most durable first, with how long that takes; at least one."""
        unknown_s = self._unknown_save_s
        tiers = tuple(
            SaveTarget.of(name, times, confidence=self._part, if_unknown_s=unknown_s, at_least_s=self._least_save_s)
            for name, times in self._save_times_s().items()
        )
        return tiers or (SaveTarget(_NO_TIER, Bound(0.0, self._part, True, 1, "nothing is saved")),)

    def sample(self, *, count: int, lived: int, is_near: bool = False, cost_s: float = math.inf) -> Sample:
        """What this rank knows now; `count` and `lived` as in `Sample`.

        Args:
            count: iterations of the run that are done.
            lived: iterations that have begun in this process.
            is_near: whether the deadline is so near that only the next iteration counts.
            cost_s: of an exchange with the other ranks; infinite: not known.
        """
        remaining_s = self.remaining_s()
        usual_s, step, far_s = self._next_iterations(remaining_s, is_near)
        return Sample(
            remaining_s=remaining_s,
            usual_s=usual_s,
            step=step,
            far_s=far_s,
            # after a long iteration at once: they may be as long from now on
            interval=interval_steps(max(usual_s, self._times.newest_s), cost_s) if usual_s else 1,
            tiers=self.tiers(),
            count=count,
            lived=lived,
            at_once_s=self._at_once_s(),
            is_step_first=self._times.has_first_only,
            is_step_tried=(self.is_step_tried and self._tried_at != lived) or not self._may_try(),
        )

    def is_near(self, sample: Sample, *, may_leave: bool = False) -> bool:
        """Whether there may be a decision to take before the sample after this one; arguments as `near_below_s`."""
        near_s = near_below_s(sample, self._reserve_s, may_leave=may_leave) + CHECK_S
        if self._may_try() and not self._tried and not any(tier.is_measured for tier in sample.tiers):
            near_s = max(near_s, self._trial_below_s)
        return sample.at_once_s < math.inf or sample.remaining_s <= near_s

    # --- what is done about it ----------------------------------------------------------------------------------------

    def plan(
        self,
        common: Sample,
        *,
        remaining_s: Sequence[float] | None = None,
        at_once_s: Sequence[float] | None = None,
        min_workers: int = 1,
    ) -> StopPlan:
        """What to do now; the same on all ranks for the same arguments. A save in the plan is assumed to be made.

        Args:
            common: what all ranks have agreed on.
            remaining_s: by rank, see `plan_stop`; None: there is no run without all of them.
            at_once_s: the same.
            min_workers: see `plan_stop`.

        Raises:
            ValueError: see `plan_stop`.
        """
        plan = plan_stop(
            [common.remaining_s] if remaining_s is None else remaining_s,
            common,
            min_workers=min_workers,
            reserve_s=self._reserve_s,
            at_once_s=[common.at_once_s] if at_once_s is None else at_once_s,
            may_try={tier.name for tier in common.tiers} - self._tried if self._may_try() else (),
            trial_below_s=self._trial_below_s,
            is_saved=self._saved_at == common.lived,
        )
        if plan.decision.saves:  # notices so far are answered by it, and it measures the tier
            self._saved_at = common.lived
            if common.may_try_step:
                self._tried_at, self.is_step_tried = common.lived, True
            self._answered_s = self._clock() + (_SAME_NOTICE_S if common.at_once_s < math.inf else 0.0)
            self._tried.update(() if plan.decision.tier is None else (plan.decision.tier,))
        return plan

    # ------------------------------------------------------------------------------------------------------------------

    def _may_try(self) -> bool:
        """Whether a save may be made only to measure it: not where the user has given its time."""
        return not self._least_save_s

    def _at_once_s(self) -> float:
        """See `Sample.at_once_s`; call `remaining_s` before."""
        since_s = unsure_since_s(self.deadline)
        if since_s is None or since_s <= self._answered_s:
            return math.inf
        return max(0.0, SHORTEST_GRACE_S - (self._clock() - since_s))

    def _next_iterations(self, remaining_s: float, is_near: bool) -> tuple[float, Bound | None, float]:
        """The usual iteration, the bound of the next one, and of those until all ranks know of a deadline."""
        now_s = self._clock()
        is_old = now_s >= self._stale_at_s or self._times.count >= self._stale_at_count
        if is_old or self._times.newest_s > self._known[2] or (is_near and not self._is_for_near):
            far_s = min(_MAX_VALID_S, max(_MIN_VALID_S, _VALID_FRACTION * remaining_s))
            self._is_for_near = is_near
            self._known = self._bounds(now_s, _VALID_NEAR_S if is_near else far_s)
        return self._known

    def _bounds(self, now_s: float, valid_s: float) -> tuple[float, Bound | None, float]:
        self._stale_at_s, self._stale_at_count = now_s + valid_s, self._times.count + 1
        view = self._times.view()
        if view is None:
            return 0.0, None, 0.0
        # iterations that may begin while this is valid: a pause may be due among them
        ahead = max(1, int(valid_s / max(view.usual_s, 1e-6)))
        self._stale_at_count = self._times.count + ahead
        step = view.bound(ahead, self._part)
        until_known = ahead + 2 * interval_steps(view.usual_s, math.inf) + NEAR_ITERATIONS
        far = step if view.rhythm is None else view.bound(until_known, self._part)
        return view.usual_s, step, 0.0 if far is None else far.seconds
