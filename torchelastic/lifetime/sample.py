"""What one rank knows of the time that is left, and what all ranks know together: the worst of each number.

Pure. The numbers travel as one list of floats whose element-wise maximum over the ranks is what all of them know,
so that every rank then decides from the same numbers, and comes to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchelastic.lifetime.bounds import Bound
from torchelastic.lifetime.decision import Tier

#: Nobody who learns of a deadline waits much longer than this for the others to hear of it.
MAX_DELAY_S = 0.5
#: Share of the training time that an exchange of the ranks may cost.
MAX_SHARE = 0.01
#: So many of the slowest iterations before the last safe one the ranks begin to agree in every iteration.
NEAR_ITERATIONS = 3
#: Where two of the `Sample.numbers` stand, which are what they say with the sign turned,
REMAINING, AT_ONCE = 0, 8
#: how many of them are not of a tier,
_COMMON = 9
#: and what stands for the times of one to which nobody has saved.
_NOT_MEASURED = -1.0


def interval_steps(step_s: float, cost_s: float, share: float = MAX_SHARE, max_delay_s: float = MAX_DELAY_S) -> int:
    """How many steps apart two exchanges of the ranks are to be: rare enough to be cheap, often enough to be prompt.

    All ranks have to take part after the same step, so this one thing cannot go by their clocks. It is as small as the
    cost allows: steps may become a hundred times as long, and nobody knows before the next exchange.

    Args:
        step_s: a usual step.
        cost_s: of one exchange; infinite: not known.
        share: of the time that it may cost.
        max_delay_s: what one rank knows the others are to hear about so soon, whatever that costs.

    >>> interval_steps(step_s=0.1, cost_s=0.0002)
    1
    >>> interval_steps(step_s=0.001, cost_s=0.0002)
    20
    >>> interval_steps(step_s=0.00001, cost_s=0.01)
    50000
    """
    prompt = max(1, math.floor(max_delay_s / max(step_s, 1e-9) + 1e-6))
    return max(1, min(math.ceil(min(cost_s / max(share * step_s, 1e-9), prompt)), prompt))


@dataclass(frozen=True)
class Sample:
    """The numbers that a decision rests on: of one rank, or what all ranks have agreed on.

    Attributes:
        remaining_s: until the deadline; infinite: none is known.
        usual_s: the usual iteration; 0: not known.
        step: how long the next iteration takes at most; None: not known.
        far_s: the same, for any of the iterations until the sample after the next.
        interval: iterations until the next sample, while the deadline is far.
        tiers: what saves take, the most durable first.
        count: iterations of the run that are done.
        lived: iterations that have begun in this process.
        at_once_s: a notice has come that does not say when the end is, and nothing was saved since: seconds until then
            at the earliest. Infinite: there is none.
    """

    remaining_s: float
    usual_s: float
    step: Bound | None
    far_s: float
    interval: int
    tiers: tuple[Tier, ...]
    count: int
    lived: int
    at_once_s: float = math.inf

    def numbers(self) -> list[float]:
        """As a list; the larger, the worse. As long on all ranks as they have the same tiers.

        What was not measured is -1, so that it counts for nothing beside what another rank has measured: there are
        jobs in which only one rank saves.
        """
        step = (-1.0, 1.0) if self.step is None else (self.step.seconds, float(not self.step.is_assured))
        words = [-self.remaining_s, self.usual_s, *step, self.far_s, float(self.interval)]
        words += [float(self.count), float(self.lived), -self.at_once_s]
        for tier in self.tiers:
            usual_s = tier.bound.seconds if tier.usual_s is None else tier.usual_s
            measured = [tier.bound.seconds, float(not tier.bound.is_assured), usual_s]
            words += measured if tier.is_measured else [_NOT_MEASURED, 0.0, _NOT_MEASURED]
        return words

    def agreed(self, worst: Sequence[float]) -> Sample:
        """What all ranks know together.

        Args:
            worst: the element-wise maximum of all ranks' `numbers`.

        Raises:
            ValueError: these are not as many as this rank has: the ranks have different tiers.
        """
        if len(worst) != len(self.numbers()):
            raise ValueError("the ranks were given different tiers: give every IterManager the same")
        remaining_s, usual_s, step_s, step_is_guess, far_s, interval, count, lived, at_once_s = worst[:_COMMON]
        tiers = tuple(
            tier if seconds < 0.0 else Tier(tier.name, _worst(tier.bound, seconds, is_guess), tier_usual_s)
            for tier, (seconds, is_guess, tier_usual_s) in zip(self.tiers, _threes(worst[_COMMON:]), strict=True)
        )
        own_step = self.step or Bound(0.0, 0.0, False, 0, "no iteration was measured yet")
        return replace(
            self,
            remaining_s=-remaining_s,
            usual_s=usual_s,
            step=None if step_s < 0.0 else _worst(own_step, step_s, step_is_guess),
            far_s=far_s,
            interval=int(interval),
            tiers=tiers,
            count=int(count),
            lived=int(lived),
            at_once_s=-at_once_s,
        )


def _worst(own: Bound, seconds: float, is_guess: float) -> Bound:
    if seconds == own.seconds and bool(is_guess) is not own.is_assured:
        return own
    samples = max(1, own.samples)  # another rank has measured it, if this one has not
    because = "the longest of all ranks' bounds"
    return replace(own, seconds=seconds, is_assured=not is_guess, samples=samples, because=because)


def _threes(words: Sequence[float]) -> list[tuple[float, float, float]]:
    return [(words[at], words[at + 1], words[at + 2]) for at in range(0, len(words), 3)]
