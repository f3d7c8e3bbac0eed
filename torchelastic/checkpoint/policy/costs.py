"""What saves cost, measured while the run goes on: a mean to choose the period by, a bound to meet a deadline by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchelastic.checkpoint.policy.arguments import FrozenMapping, real_number, text, whole_number

__all__ = ["DurableBound", "SaveCosts", "TierCost"]


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
class DurableBound:
    """How long a save to a tier will take at most, until it is durable.

    Attributes:
        seconds: the bound.
        is_assured: whether it holds with the confidence that was asked for; else it is a guess from too few saves.
        saves: how many saves it rests on.
        because: a sentence for the log.
    """

    seconds: float
    is_assured: bool
    saves: int
    because: str


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

    def durable_bound(self, tier: str, *, confidence: float = 0.99, margin: float = 1.5) -> DurableBound | None:
        """How long the next save to a tier takes at most, until it is durable; None if none was observed.

        The bound is the k-th smallest of the n newest times, k = confidence x (n + 1) rounded up. The next save keeps
        it with that confidence, whatever the distribution, if the order of the saves does not matter (they are
        exchangeable). That takes n >= 1/(1 - confidence) - 1 saves: 99 for 0.99, 19 for 0.95. With fewer the bound is
        the longest time so far x margin, and it says so.

        Source: split conformal prediction; V. Vovk, A. Gammerman, G. Shafer, "Algorithmic learning in a random world"
        (2005); J. Lei et al., "Distribution-free predictive inference for regression", JASA 113 (2018).

        Args:
            tier: its name.
            confidence: above 0 and below 1.
            margin: how many times the longest save is the guess; at least 1.

        Raises:
            ValueError: an argument out of its range.
        """
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"confidence is {confidence}: give a share above 0 and below 1, for example 0.99")
        if not 1.0 <= margin < math.inf:
            raise ValueError(f"margin is {margin}: give a factor of at least 1, for example 1.5")
        cost = self.of(tier)
        if cost is None:
            return None
        ordered = sorted(cost.recent_durable_s)
        saves = len(ordered)
        # the last digits of a product of floats must not ask for one save more
        rank = math.ceil(confidence * (saves + 1) - 1e-9)
        if rank <= saves:
            seconds = ordered[rank - 1]
            because = f"{confidence:.4g} of saves to {tier!r} take no longer: number {rank} of {saves}, by time"
            return DurableBound(seconds, True, saves, because)
        needed = math.ceil(1.0 / (1.0 - confidence) - 1.0 - 1e-9)
        because = (
            f"only {saves} saves to {tier!r} are known, a confidence of {confidence:.4g} takes {needed} (window: "
            f"{self.window}): {margin:.4g} times the longest"
        )
        return DurableBound(ordered[-1] * margin, False, saves, because)
