"""What saves cost, measured while the run goes on: a mean to choose the period by, a bound to meet a deadline by.

Pure: no clock, no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchelastic.checkpoint.policy.arguments import FrozenMapping, real_number, text, whole_number

#: How many times the longest one is the bound, where there are too few samples for the confidence.
MARGIN = 1.5


@dataclass(frozen=True)
class Bound:
    """How long something takes at most.

    Attributes:
        seconds: the bound.
        confidence: the share of cases that was asked for, that it should hold in.
        is_assured: whether there were enough samples for that; else it is a guess.
        samples: how many it rests on.
        because: a few words for the log.
        margin_s: so much of it is beyond the longest that was seen, since there were too few samples.
    """

    seconds: float
    confidence: float
    is_assured: bool
    samples: int
    because: str
    margin_s: float = 0.0

    def __str__(self) -> str:
        return f"at most {self.seconds:.3g} s ({self.because})"


def needed_samples(confidence: float) -> int:
    """How many samples `upper_bound` takes for a confidence: 1/alpha - 1 with alpha = 1 - confidence.

    Raises:
        ValueError: the confidence is not above 0 and below 1.

    >>> needed_samples(0.99), needed_samples(0.95)
    (99, 19)
    """
    _check_confidence(confidence)
    # the last digits of a quotient of floats must not ask for one sample more
    return max(1, math.ceil(1.0 / (1.0 - confidence) - 1.0 - 1e-9))


def upper_bound(
    durations_s: Sequence[float], confidence: float = 0.99, *, margin: float = MARGIN, what: str = "samples"
) -> Bound | None:
    """How long the next one takes at most; None without any sample.

    The k-th smallest of n durations, k = confidence x (n + 1) rounded up. The next one keeps it with that confidence,
    whatever the distribution, if their order does not matter (they are exchangeable). With fewer than `needed_samples`
    it is the longest x a margin, and says so: `margin` for one sample, less for each further one, 1 for enough of them.
    The next one is beyond m times the longest of n with the probability m^-k / (n + 1), where the tail is that of a
    Pareto distribution with the index k; `margin` says which k, and m is what keeps that at 1 - confidence for any n.

    Source: split conformal prediction; V. Vovk, A. Gammerman, G. Shafer, "Algorithmic learning in a random world"
    (2005); J. Lei et al., "Distribution-free predictive inference for regression", JASA 113 (2018).

    Args:
        durations_s: how long it took, in any order.
        confidence: above 0 and below 1.
        margin: how many times the only sample is the guess; at least 1.
        what: the durations, for the reason.

    Raises:
        ValueError: a duration is negative, infinite or NaN, or another argument is out of its range.

    >>> upper_bound([float(second) for second in range(1, 100)], 0.99).seconds
    99.0
    >>> [round(upper_bound([2.0] * count).seconds, 2) for count in (1, 2, 10, 50, 98)]
    [3.0, 2.88, 2.51, 2.14, 2.0]
    """
    ordered = _checked(durations_s, confidence, margin)
    if not ordered:
        return None
    samples = len(ordered)
    rank = math.ceil(confidence * (samples + 1) - 1e-9)
    if rank > samples:
        return _from_too_few(ordered, confidence, margin, what)
    because = f"number {rank} of {samples} {what} by time, for a confidence of {confidence:.4g}"
    return Bound(ordered[rank - 1], confidence, True, samples, because)


@dataclass(frozen=True)
class TierCost:
    """What saves to one tier have cost so far; all of it in seconds.

    Attributes:
        saves: how many were observed.
        stall_s: mean time that training stood still for a save.
        slowed_s: mean time that training lost while the rest of a save ran in the background.
        durable_s: mean time from the beginning of a save until it was durable, the stall included.
        recent_durable_s: the newest of these times, oldest first.
    """

    saves: int
    stall_s: float
    slowed_s: float
    durable_s: float
    recent_durable_s: tuple[float, ...]

    @property
    def cost_s(self) -> float:
        """What a save costs the training: the stall and the slow-down."""
        return self.stall_s + self.slowed_s


@dataclass(frozen=True)
class SaveCosts:
    """The costs of saves, by tier. A value: `observed` returns a new one.

    Args:
        weight: the weight of the newest save in the mean, above 0 and at most 1. Until there have been 1/weight saves
            the mean is the plain one, so that the first save, which is often the slowest, does not rule for long.
        window: how many of the newest saves the bound rests on.
        tiers: what was observed; leave it to `observed`.

    Raises:
        ValueError: an argument out of its range.

    >>> costs = SaveCosts().observed("durable", stall_s=0.5, durable_s=8.0)
    >>> costs = costs.observed("durable", stall_s=0.1, durable_s=6.0, slowed_s=1.0)
    >>> costs.of("durable").cost_s
    0.8
    >>> costs.of("memory") is None
    True
    """

    weight: float = 0.2
    window: int = 200
    tiers: Mapping[str, TierCost] = field(default=FrozenMapping[TierCost]())

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight is {self.weight}: give the weight of the newest save, above 0 and at most 1")
        whole_number("window", self.window, at_least=1, remedy="give how many of the newest saves to remember")
        object.__setattr__(self, "tiers", FrozenMapping(self.tiers))

    def observed(self, tier: str, *, stall_s: float, durable_s: float, slowed_s: float = 0.0) -> SaveCosts:
        """The costs with one more save.

        Args:
            tier: its name, the same in `YoungDaly`.
            stall_s: for how long training stood still.
            durable_s: from the beginning of the save until it was durable, the stall included.
            slowed_s: what the background part took from training: the sum, over the steps that ran beside it, of how
                much longer than usual they were.

        Raises:
            ValueError: a time is negative, infinite or NaN, or the tier has no name.
        """
        text("tier", tier, "name the tier, for example 'durable'")
        remedy = "give seconds, 0 or more"
        stall_s = real_number("stall_s", stall_s, remedy=remedy)
        durable_s = real_number("durable_s", durable_s, remedy=remedy)
        slowed_s = real_number("slowed_s", slowed_s, remedy=remedy)
        old = self.of(tier) or TierCost(0, 0.0, 0.0, 0.0, ())
        weight = max(self.weight, 1.0 / (old.saves + 1))
        new = TierCost(
            saves=old.saves + 1,
            stall_s=old.stall_s + weight * (stall_s - old.stall_s),
            slowed_s=old.slowed_s + weight * (slowed_s - old.slowed_s),
            durable_s=old.durable_s + weight * (durable_s - old.durable_s),
            recent_durable_s=(*old.recent_durable_s, durable_s)[-self.window :],
        )
        return replace(self, tiers={**self.tiers, tier: new})

    def of(self, tier: str) -> TierCost | None:
        """What saves to a tier cost; None if none was observed."""
        return self.tiers.get(tier)


def _from_too_few(ordered: Sequence[float], confidence: float, margin: float, what: str) -> Bound:
    alpha, samples, longest_s = 1.0 - confidence, len(ordered), ordered[-1]
    factor = margin ** max(0.0, math.log(alpha * (samples + 1)) / math.log(alpha * 2))
    because = (
        f"only {samples} {what} are known, a confidence of {confidence:.4g} takes {needed_samples(confidence)}: "
        f"{factor:.4g} times the longest"
    )
    seconds = longest_s * factor
    return Bound(seconds, confidence, False, samples, because, seconds - longest_s)


def _checked(durations_s: Sequence[float], confidence: float, margin: float) -> list[float]:
    _check_confidence(confidence)
    if not 1.0 <= margin < math.inf:
        raise ValueError(f"margin is {margin}: give a factor of at least 1, for example 1.5")
    ordered = sorted(durations_s)
    # a NaN may stand anywhere in what was sorted, but it never gets lost in a sum
    if ordered and not (ordered[0] >= 0.0 and math.isfinite(math.fsum(ordered))):
        raise ValueError("a duration is negative, infinite or NaN: give seconds, 0 or more")
    return ordered


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}: give a share above 0 and below 1, for example 0.99")
