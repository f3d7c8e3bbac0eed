"""The save policy that weighs what a save costs against what a failure would cost, both as measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number, text
from torchelastic.checkpoint.policy.costs import TierCost
from torchelastic.checkpoint.policy.failure_rate import FailurePrior
from torchelastic.checkpoint.policy.formulas import daly_period_s, exact_cost
from torchelastic.checkpoint.policy.saving import SaveDecision, SaveMoment, SavePolicy
from torchelastic.checkpoint.policy.schedules import already_saved, due_in_s, running, shown_s


@dataclass(frozen=True)
class YoungDaly(SavePolicy):
    """Saves with the period that wastes least, by Daly's formula, from the measured cost of saves and rate of failures.

    The period is the training between two saves, so the stall of a save comes on top. It lies between `min_s` and
    `max_s`, and (below `max_s`) is no shorter than a save takes until it is durable, so that saves do not pile up.

    A decision's numbers: `cost_s`, `mtbf_s`, `period_s`, `due_in_s`; `waste_saving` = cost/period and `waste_repeating`
    = period/(2 mtbf), the shares of time that saves and repeated work take to the first order; `waste`, the share that
    both take, exactly (`exact_cost`; the time to restore is left out, no period changes it); and `period_steps`, if the
    time of a step is known.

    Ignores the step's number, and how long a restore takes.

    Args:
        tier: whose costs count; the name used in `SaveCosts.observed`.
        min_s: the shortest period.
        max_s: the longest period, whatever the measurements say.
        prior: what to expect of failures, instead of the prior of `moment.failures`.
        prior_cost_s: what a save costs, until the first one was measured.
        failure_classes: the classes that only this tier repairs; None: every failure that was counted.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of its range; `min_s` above `max_s`.
    """

    tier: str = "durable"
    min_s: float = 1.0
    max_s: float = 3600.0
    prior: FailurePrior | None = None
    prior_cost_s: float = 1.0
    failure_classes: Collection[str] | None = None

    def __post_init__(self) -> None:
        text("tier", self.tier, "name the tier whose saves are measured, for example 'durable'")
        real_number("min_s", self.min_s, remedy="give the shortest period in seconds, 0 or more")
        real_number("max_s", self.max_s, above=0.0, remedy="give the longest period in seconds, above 0")
        if self.min_s > self.max_s:
            raise ValueError(f"min_s is {self.min_s}: give no more than max_s={self.max_s}")
        if self.prior is not None and not isinstance(self.prior, FailurePrior):
            raise TypeError(f"prior is {self.prior!r}: give a FailurePrior(failures, seconds), or None")
        real_number("prior_cost_s", self.prior_cost_s, remedy="give the seconds of training a save costs, 0 or more")
        if isinstance(self.failure_classes, str):
            raise TypeError(f"failure_classes is {self.failure_classes!r}: give a set of names, or None for all")
        if self.failure_classes is not None:
            object.__setattr__(self, "failure_classes", frozenset(self.failure_classes))

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if the period, and the stall of the last save, have passed since that save began."""
        measured = moment.costs.of(self.tier)
        cost_s = self.prior_cost_s if measured is None else measured.cost_s
        mtbf_s = moment.failures.mtbf_s(self.failure_classes, prior=self.prior)
        period_s, bound = self._period_s(measured, cost_s, mtbf_s)
        stall_s = measured.stall_s if measured is not None and moment.last_saved_s is not None else 0.0
        left_s = due_in_s(moment, period_s + stall_s)
        numbers = _numbers(cost_s, mtbf_s, period_s, left_s, moment.step_s)
        if moment.is_saved:
            return SaveDecision(False, already_saved(moment).because, numbers)
        when = f"due in {shown_s(left_s)}" if left_s > 0.0 else f"due after {shown_s(moment.since_s)}"
        guess = " (a guess, none was measured)" if measured is None else ""
        because = (
            f"{when}: the period is {shown_s(period_s)}{bound}, since a save to {self.tier!r} costs {shown_s(cost_s)}"
            f"{guess} and something fails every {shown_s(mtbf_s)}; {100 * numbers['waste']:.2g} % wasted"
        )
        return SaveDecision(left_s <= 0.0, because + (running(moment) if left_s <= 0.0 else ""), numbers)

    def _period_s(self, measured: TierCost | None, cost_s: float, mtbf_s: float) -> tuple[float, str]:
        """The period, and what held it if that was not the formula."""
        best_s = daly_period_s(cost_s, mtbf_s)
        background_s = 0.0 if measured is None else max(0.0, measured.durable_s - measured.stall_s)
        period_s = max(best_s, background_s, self.min_s)
        if period_s > self.max_s:
            return self.max_s, " (max_s)"
        if period_s == best_s:
            return best_s, ""
        return period_s, " (min_s)" if period_s == self.min_s else " (until the save before is durable)"


def _numbers(cost_s: float, mtbf_s: float, period_s: float, left_s: float, step_s: float | None) -> dict[str, float]:
    saving, repeating, waste = 0.0, 0.0, 0.0
    if period_s > 0.0:
        saving, repeating = cost_s / period_s, period_s / (2.0 * mtbf_s)
        waste = 1.0 - 1.0 / exact_cost(period_s, cost_s, mtbf_s)
    numbers = {
        "cost_s": cost_s,
        "mtbf_s": mtbf_s,
        "period_s": period_s,
        "due_in_s": left_s,
        "waste_saving": saving,
        "waste_repeating": repeating,
        "waste": waste,
    }
    if step_s:
        numbers["period_steps"] = max(1.0, period_s / step_s)
    return numbers
