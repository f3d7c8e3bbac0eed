"""What one rank knows of its own deadline and of its next iterations, checked by the clock.

Iterations may become a hundred times as long at any moment, so nothing here is due after a number of them alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from torchelastic.lifetime.bounds import Bound, guess
from torchelastic.lifetime.deadline import Deadline, unsure_since_s
from torchelastic.lifetime.decision import SHORTEST_GRACE_S, Tier, part_of_risk
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.outlook import NEAR_ITERATIONS, Outlook, interval_steps

#: A deadline is asked for what is left so often, while it is far.
CHECK_S = 0.1
#: How long iterations take is worked out anew so often near the deadline,
_WORK_OUT_NEAR_S = 0.05
#: after such a share of the time that is left while it is far, within these bounds; and always when one was longer than
#: the bound.
_WORK_OUT_SHARE, _WORK_OUT_S, _MAX_WORK_OUT_S = 0.02, 1.0, 30.0
#: Schedulers signal every process of a job, and the ranks do not all get it at once: a save answers the notices that
#: come so much later, too.
_SAME_NOTICE_S = 5.0


class DeadlineMonitor:
    """On the training thread of one rank.

    Args:
        deadline: when to be done.
        times: of the iterations.
        confidence: that the save before the deadline is done in time.
        clock: monotonic seconds; that of the deadline.

    Raises:
        ValueError: the confidence is not above 0 and below 1.

    Attributes:
        deadline: when to be done.
        earlier_bound_s: how long an iteration took at most in an earlier life; counts until one is known.
        part: the confidence of each bound, so that all of them together hold with the confidence.
    """

    def __init__(
        self,
        deadline: Deadline,
        times: IterationTimes,
        *,
        confidence: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline, self.earlier_bound_s, self.part = deadline, 0.0, part_of_risk(confidence)
        self._times, self._clock = times, clock
        self._answered_s = -math.inf
        self._tried: set[str] = set()
        self._known: tuple[float, Bound | None, float] = (0.0, None, 0.0)
        self._stale_at_s, self._stale_at_count, self._is_for_near = -math.inf, 0, False

    def forget(self) -> None:
        """The group has changed: its new members know of no save that was made."""
        self._tried.clear()
        self._answered_s, self._stale_at_s = -math.inf, -math.inf

    def remaining_s(self) -> float:
        """Seconds until the deadline; infinite: none is known."""
        left_s = self.deadline.remaining_s(self._clock())
        return math.inf if left_s is None else left_s

    def at_once_s(self) -> float:
        """See `Outlook.at_once_s`; ask `remaining_s` before."""
        since_s = unsure_since_s(self.deadline)
        if since_s is None or since_s <= self._answered_s:
            return math.inf
        return max(0.0, SHORTEST_GRACE_S - (self._clock() - since_s))

    def saves(self, tier: str | None) -> None:
        """A save is made now, to this tier: notices so far are answered by it, and it measures the tier."""
        self._answered_s = self._clock() + _SAME_NOTICE_S
        self._tried.update(() if tier is None else (tier,))

    @property
    def has_tried(self) -> bool:
        """Whether any save was begun in this life because a deadline is known."""
        return bool(self._tried)

    def may_try(self, tiers: Sequence[Tier]) -> Collection[str]:
        """The tiers to which no save was begun in this life."""
        return {tier.name for tier in tiers} - self._tried

    def outlook(
        self, tiers: Sequence[Tier], *, count: int, lived: int, is_near: bool = False, cost_s: float = math.inf
    ) -> Outlook:
        """What this rank knows now.

        Args:
            tiers: what saves take, the most durable first.
            count: iterations of the run that are done.
            lived: iterations that have begun in this process.
            is_near: whether the deadline is so near that the next iteration counts.
            cost_s: of an exchange with the other ranks; infinite: not known.
        """
        remaining_s = self.remaining_s()
        usual_s, step, far_s = self._next_iterations(remaining_s, is_near)
        return Outlook(
            remaining_s=remaining_s,
            usual_s=usual_s,
            step=step,
            far_s=far_s,
            # after a long iteration at once: they may be as long from now on
            interval=interval_steps(max(usual_s, self._times.newest_s), cost_s) if usual_s else 1,
            tiers=tuple(tiers),
            count=count,
            lived=lived,
            at_once_s=self.at_once_s(),
        )

    def step_bound(self) -> Bound | None:
        """How much time to leave for the next iteration."""
        view = self._times.view()
        return None if view is None else view.bound(1, self.part)

    def _next_iterations(self, remaining_s: float, is_near: bool) -> tuple[float, Bound | None, float]:
        """The usual iteration, the slowest of the next one, and of those until all ranks have heard of a deadline."""
        now_s = self._clock()
        is_old = now_s >= self._stale_at_s or self._times.count >= self._stale_at_count
        if is_old or self._times.newest_s > self._known[2] or (is_near and not self._is_for_near):
            far_s = min(_MAX_WORK_OUT_S, max(_WORK_OUT_S, _WORK_OUT_SHARE * remaining_s))
            self._is_for_near = is_near
            self._known = self._work_out(now_s, _WORK_OUT_NEAR_S if is_near else far_s)
        return self._known

    def _work_out(self, now_s: float, valid_s: float) -> tuple[float, Bound | None, float]:
        self._stale_at_s, self._stale_at_count = now_s + valid_s, self._times.count + 1
        view = self._times.view()
        if view is None:
            earlier = guess(self.earlier_bound_s, "none was measured: as in an earlier life", self.part)
            return 0.0, earlier if self.earlier_bound_s else None, self.earlier_bound_s
        # iterations that may begin before this is worked out anew: a pause may be due among them
        ahead = max(1, int(valid_s / max(view.usual_s, 1e-6)))
        self._stale_at_count = self._times.count + ahead
        step = view.bound(ahead, self.part)
        until_heard = ahead + 2 * interval_steps(view.usual_s, math.inf) + NEAR_ITERATIONS
        far = step if view.rhythm is None else view.bound(until_heard, self.part)
        return view.usual_s, step, 0.0 if far is None else far.seconds
