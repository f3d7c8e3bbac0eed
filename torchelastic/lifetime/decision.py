"""When to stop before a deadline, and into which tier to save then: a pure function, with its reason and numbers.

The rule: go on as long as one more step, and a save after it into the most durable tier that fits now, are expected to
be done in time. So the save is begun at the last safe step, and not at the first that looks dangerous.

Four saves come earlier, and training goes on after them. One at once at a notice that does not say how much time is
left (`docker stop` gives 10 s, pods on spot nodes of GKE have 15 s, and a process cannot know). A trial save, where no
save was measured: it may take longer than the guess. And one before a trial step, where only the first steps are known,
which may have compiled: the next ones may be much faster. And one after an attempt that was killed in an iteration, see
`careful`.

Bounds that rest on few samples have a margin, and the reserve is for what is not measured: the larger of both is kept,
not their sum.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torchelastic.checkpoint.policy.arguments import FrozenMapping
from torchelastic.checkpoint.policy.costs import Bound, upper_bound
from torchelastic.lifetime.iteration_times import guess

#: A trial save is made when the deadline is nearer than this: before, a periodic save may be measured.
TRIAL_BELOW_S = 3600.0
#: A trial step pays only where the first steps took so long that the others may well be faster.
TRIAL_STEP_FROM_S = 10.0
#: How long a save takes while none was measured, by words in the name of the tier; and for any other tier, since a
#: durable one may be a busy file system or an object store.
_GUESSES_S = {"memory": 2.0, "ram": 2.0, "shm": 2.0, "disk": 10.0, "local": 10.0, "nvme": 10.0, "ssd": 10.0}
_DURABLE_GUESS_S = 60.0


def guess_save_s(tier: str) -> float:
    """The assumed seconds of a save into the tier of that name while none was measured.

    >>> guess_save_s("memory"), guess_save_s("local disk"), guess_save_s("durable"), guess_save_s("programs")
    (2.0, 10.0, 60.0, 60.0)
    """
    words = re.findall("[a-z]+", tier.lower())
    return next((seconds for word, seconds in _GUESSES_S.items() if word in words), _DURABLE_GUESS_S)


@dataclass(frozen=True)
class SaveTarget:
    """A place to save to, and how long that takes.

    Args:
        name: of the tier.
        bound: how long a save takes at most, until it is durable there.
        usual_s: how long it usually takes; None: as the bound.
    """

    name: str
    bound: Bound
    usual_s: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether any save was measured; else the bound is a guess."""
        return self.bound.samples > 0

    @classmethod
    def of(
        cls,
        name: str,
        save_times_s: Sequence[float],
        *,
        confidence: float = 0.99,
        if_unknown_s: float | None = None,
        at_least_s: float = 0.0,
    ) -> SaveTarget:
        """A tier from its measured saves.

        Args:
            name: of the tier.
            save_times_s: how long its saves took until they were durable; for example the `recent_durable_s` of
                `torchelastic.checkpoint.policy.costs.TierCost`.
            confidence: of the bound.
            if_unknown_s: the bound if there was no save yet; None: `guess_save_s` of the name.
            at_least_s: least value of the bound.
        """
        measured = upper_bound(save_times_s, confidence, what="saves")
        if measured is None:
            seconds = max(guess_save_s(name) if if_unknown_s is None else if_unknown_s, at_least_s)
            return cls(name, guess(seconds, f"no save to {name!r} was measured yet: a guess", confidence))
        usual_s = statistics.median(save_times_s)
        if measured.seconds < at_least_s:
            reserved = Bound(at_least_s, confidence, measured.is_assured, measured.samples, "reserved by the user")
            return cls(name, reserved, usual_s)
        return cls(name, measured, usual_s)


@dataclass(frozen=True)
class StopDecision:
    """What to do now.

    Attributes:
        action: "go on", "save and go on" (the end may come at any moment, or to measure a save), or "save and stop".
        tier: of the save, now or later; None: no deadline.
        fits: whether the save into that tier is expected to be done in time.
        given_up_s: unused seconds before the deadline, after a save of usual length.
        because: one sentence for the log.
        numbers: its inputs, by name with unit.
    """

    action: Literal["go on", "save and go on", "save and stop"]
    tier: str | None
    fits: bool
    given_up_s: float
    because: str
    numbers: Mapping[str, float] = field(default=FrozenMapping[float]())

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", FrozenMapping(self.numbers))

    @property
    def stops(self) -> bool:
        """Whether to save now, and stop."""
        return self.action == "save and stop"

    @property
    def saves(self) -> bool:
        """Whether to save now; it may go on after that."""
        return self.action != "go on"

    def __str__(self) -> str:
        return f"{self.action}: {self.because}"


def part_of_risk(confidence: float) -> float:
    """The confidence of each of two bounds with which both of them hold (Bonferroni).

    >>> round(part_of_risk(0.99), 6)
    0.995
    """
    return 1.0 - (1.0 - confidence) / 2.0


def decide(
    remaining_s: float | None,
    step: Bound | None,
    tiers: Sequence[SaveTarget],
    *,
    reserve_s: float = 0.0,
    at_once_s: float | None = None,
    may_try: Collection[str] = (),
    trial_below_s: float = TRIAL_BELOW_S,
    may_try_step: bool = False,
    is_saved: bool = False,
) -> StopDecision:
    """Whether to train one more step, or to save into which tier, and to stop then or to go on.

    The bounds of the step and of the saves share the risk: with `part_of_risk(confidence)` in each of them, the
    deadline is met with `confidence`.

    Args:
        remaining_s: until the deadline; None: none is known. Negative: it is over.
        step: how much time to leave for one more step (`iteration_times.step_bound`); None: not known yet, counts as 0.
        tiers: the most durable first; at least one.
        reserve_s: to keep besides, for what is not measured; the margins of the bounds are part of it.
        at_once_s: for a notice that does not say when the end is, with nothing saved since: seconds until the end at
            the earliest. `remaining_s` is a guess then. None: there is no such notice.
        may_try: tiers that may be saved to only to measure that: when it would be time to stop,
        trial_below_s: and before, if no tier was measured and less time than this is left.
        may_try_step: when it would be time to stop, one more step may be trained only to measure it, once all is
            saved: `step` is known from the first ones alone, which may have compiled. It pays if that is
            `TRIAL_STEP_FROM_S` or longer.
        is_saved: nothing was trained since the newest save.
    """
    decision = _before_deadline(remaining_s, step, tiers, reserve_s)
    if at_once_s is not None and not decision.stops:
        return _at_once(at_once_s, decision, step, tiers, reserve_s)
    tier = next((tier for tier in tiers if tier.name == decision.tier), None)
    if tier is None:
        return decision
    if tier.is_measured or tier.name not in may_try:
        pays = may_try_step and step is not None and step.seconds >= TRIAL_STEP_FROM_S
        return _trial_step(decision, tier, reserve_s, is_saved) if pays else decision
    is_unknown = not any(other.is_measured for other in tiers)
    if decision.stops or (is_unknown and decision.numbers["remaining_s"] <= trial_below_s):
        because = f"a save to {tier.name!r} was never measured, and takes {tier.bound}: it is made now to measure it"
        return replace(decision, action="save and go on", given_up_s=0.0, because=because)
    return decision


def careful(decision: StopDecision, below_s: float, *, may_go_on: bool) -> StopDecision:
    """The decision, or to save once more before it, where an iteration may overrun the deadline as one has before.

    How long it would have taken is not known. So nothing is assumed of it, but what is trained until then is kept: else
    a job whose attempts all end in the same long iteration would not get on.

    Args:
        decision: without that.
        below_s: with less time left such an iteration may begin; 0: there was none.
        may_go_on: whether there may be a save that is not the last one.
    """
    remaining_s = decision.numbers.get("remaining_s", math.inf)
    if decision.saves or remaining_s > below_s:
        return decision
    because = (
        f"{decision.because}; but the attempt before was killed in an iteration: all is saved before there is so "
        f"little time left as there was when that began (less than {below_s:.3g} s)"
    )
    if may_go_on:
        return replace(decision, action="save and go on", because=because)
    return replace(decision, action="save and stop", given_up_s=max(0.0, remaining_s), because=because)


def _trial_step(decision: StopDecision, tier: SaveTarget, reserve_s: float, is_saved: bool) -> StopDecision:
    """One more step in place of the stop, with nothing to lose but that; if it could still be saved if it is quick."""
    save_s = tier.bound.seconds
    needed_s = save_s + _besides_s(reserve_s, tier.bound) + (0.0 if is_saved else save_s)
    if not decision.stops or decision.numbers["remaining_s"] < needed_s:
        return decision
    because = (
        f"{decision.because}; but only the first steps are known, which may have compiled: "
        f"{'all is' if is_saved else 'it is'} saved, and one more is trained to know how long others take"
    )
    action: Literal["go on", "save and go on"] = "go on" if is_saved else "save and go on"
    return replace(decision, action=action, given_up_s=0.0, because=because)


def _besides_s(reserve_s: float, *bounds: Bound | None) -> float:
    """The reserve besides these bounds, whose margins are for the same: for what is not measured."""
    return max(0.0, reserve_s - math.fsum(bound.margin_s for bound in bounds if bound is not None))


def _at_once(
    at_once_s: float, decision: StopDecision, step: Bound | None, tiers: Sequence[SaveTarget], reserve_s: float
) -> StopDecision:
    """Save now, into what may be done before the end comes at the earliest; and stop if there is no time for more."""
    tier = _best_tier(tiers, at_once_s)
    remaining_s = decision.numbers.get("remaining_s", math.inf)
    again_s = tier.bound.seconds + (0.0 if step is None else step.seconds) + tier.bound.seconds + reserve_s
    goes_on = again_s <= remaining_s
    because = (
        f"nobody has said how much time is left, at least {at_once_s:.3g} s, perhaps {remaining_s:.3g} s: saving to "
        f"{tier.name!r} at once ({tier.bound}); there is {'' if goes_on else 'no '}time to go on after it"
    )
    given_up_s = 0.0 if goes_on else _unused_s(remaining_s, tier)
    action: Literal["save and go on", "save and stop"] = "save and go on" if goes_on else "save and stop"
    fits, numbers = tier.bound.seconds <= at_once_s, {**decision.numbers, "at_once_s": at_once_s}
    return StopDecision(action, tier.name, fits, given_up_s, because, numbers)


def _before_deadline(
    remaining_s: float | None, step: Bound | None, tiers: Sequence[SaveTarget], reserve_s: float
) -> StopDecision:
    """One more step, or the last save; see `decide`."""
    if remaining_s is None or remaining_s == math.inf:
        return StopDecision("go on", None, True, 0.0, "no deadline is known")
    step_s = 0.0 if step is None else step.seconds
    tier = _best_tier(tiers, remaining_s, reserve_s)
    save_s, besides_s = tier.bound.seconds, _besides_s(reserve_s, tier.bound)
    goes_on = step_s + save_s + _besides_s(reserve_s, step, tier.bound) <= remaining_s
    given_up_s = 0.0 if goes_on else _unused_s(remaining_s, tier)
    left = f"{remaining_s:.3g} s are left" if remaining_s > 0.0 else f"the deadline is over since {-remaining_s:.3g} s"
    if save_s + besides_s <= remaining_s:
        for_step = "the next step is not known yet" if step is None else f"one more step takes {step}"
        besides = f", {besides_s:.3g} s are in reserve" if besides_s else ""
        both = "both fit" if goes_on else "both would not fit"
        because = f"{left}, and {both}: {for_step}, a save to {tier.name!r} {tier.bound}{besides}"
    elif save_s <= remaining_s:
        because = f"{left}, the reserve of {reserve_s:.3g} s is needed: a save to {tier.name!r} {tier.bound}"
    else:
        because = f"{left}, no save is sure to fit: trying the quickest, {tier.name!r}, {tier.bound}"
    because += "".join(f"; too late for {late.name!r}, which takes {late.bound}" for late in tiers[: tiers.index(tier)])
    numbers = {"remaining_s": remaining_s, "step_s": step_s, "reserve_s": reserve_s, "given_up_s": given_up_s}
    numbers |= {f"save_{other.name}_s": other.bound.seconds for other in tiers}
    action: Literal["go on", "save and stop"] = "go on" if goes_on else "save and stop"
    return StopDecision(action, tier.name, save_s <= remaining_s, given_up_s, because, numbers)


def _best_tier(tiers: Sequence[SaveTarget], left_s: float, reserve_s: float = 0.0) -> SaveTarget:
    """The most durable that fits with the reserve; else without it; else the fastest."""
    for kept_s in (reserve_s, 0.0):
        for tier in tiers:
            if tier.bound.seconds + _besides_s(kept_s, tier.bound) <= left_s:
                return tier
    return min(tiers, key=lambda tier: tier.bound.seconds)


def _unused_s(remaining_s: float, tier: SaveTarget) -> float:
    usual_s = tier.bound.seconds if tier.usual_s is None else tier.usual_s
    return max(0.0, remaining_s - usual_s)
