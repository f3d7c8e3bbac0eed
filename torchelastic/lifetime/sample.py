"""What one rank knows of the time that is left, and what all ranks have agreed on: the worst of each number. Pure.

The numbers are exchanged as one list of floats, of which the ranks take the element-wise maximum; so all of them decide
from the same numbers, and make the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchelastic.checkpoint.policy.costs import Bound
from torchelastic.lifetime.decision import SaveTarget

#: The deadline of one rank is known to the others after at most about so long.
MAX_DELAY_S = 0.5
#: Fraction of the training time that an exchange of the ranks may cost.
MAX_SHARE = 0.01
#: Steps may become so many times as long at any moment.
SLOWER = 100.0
#: So many of the slowest iterations before the last safe one the ranks begin to agree in every iteration.
NEAR_ITERATIONS = 3
#: Indices of two of the `Sample.numbers`, which have the opposite sign; how many of them are not of a bound;
REMAINING, AT_ONCE = 0, 1
_COMMON = 9
#: and a bound that this rank does not know: seconds, whether it is a guess, the margin, the usual time.
_NOT_MEASURED = (-1.0, 0.0, -math.inf, -1.0)
_WORDS = len(_NOT_MEASURED)


def interval_steps(step_s: float, cost_s: float) -> int:
    """Steps between two exchanges of the ranks: rare enough to be cheap, often enough to be prompt.

    All ranks have to take part after the same step, so it cannot follow their clocks. It is as small as the cost
    allows, and near a deadline at most `steps_to_half`, whatever that costs: steps may become far longer.

    Args:
        step_s: a usual step.
        cost_s: of one exchange; infinite: not known.

    >>> interval_steps(step_s=0.1, cost_s=0.0002)
    1
    >>> interval_steps(step_s=0.001, cost_s=0.0002)
    20
    >>> interval_steps(step_s=0.00001, cost_s=0.01)
    50000
    """
    prompt = max(1, math.floor(MAX_DELAY_S / max(step_s, 1e-9) + 1e-6))
    return max(1, min(math.ceil(min(cost_s / max(MAX_SHARE * step_s, 1e-9), prompt)), prompt))


def steps_to_half(remaining_s: float, step_s: float) -> int:
    """Steps that leave half of the time until the deadline even if they become `SLOWER` from now on; at least 1.

    >>> steps_to_half(600.0, 0.005), steps_to_half(4.0, 0.005), steps_to_half(-1.0, 0.005)
    (600, 4, 1)
    """
    return max(1, math.floor(min(remaining_s, 1e9) / (2.0 * SLOWER * max(step_s, 1e-9)) + 1e-6))


@dataclass(frozen=True)
class Sample:
    """The numbers that a decision rests on: of one rank, or what all ranks have agreed on.

    Attributes:
        remaining_s: until the deadline; infinite: none is known.
        usual_s: the usual iteration; 0: not known.
        step: bound of the next iteration; None: not known.
        far_s: bound, in seconds, of any of the iterations until the sample after the next.
        interval: iterations until the next sample, while the deadline is far.
        tiers: what saves take, the most durable first.
        count: iterations of the run that are done.
        lived: iterations that have begun in this process.
        at_once_s: see `decision.decide`; infinite: there is no such notice.
        is_step_first: `step` is known from the first iterations alone, which may have compiled.
        is_step_tried: one more was trained already to measure it, also in the attempt before; or none is to be.
        careful_below_s: see `decision.careful`.
    """

    remaining_s: float
    usual_s: float
    step: Bound | None
    far_s: float
    interval: int
    tiers: tuple[SaveTarget, ...]
    count: int
    lived: int
    at_once_s: float = math.inf
    is_step_first: bool = False
    is_step_tried: bool = False
    careful_below_s: float = 0.0

    @property
    def may_try_step(self) -> bool:
        """See `decision.decide`."""
        return self.is_step_first and not self.is_step_tried

    def numbers(self) -> list[float]:
        """As a list; the larger, the worse. Of one length on all ranks if they have the same tiers.

        What another rank has measured takes precedence over what this rank has not: in some jobs only one rank saves,
        or finds the state of the attempt before.
        """
        words = [-self.remaining_s, -self.at_once_s, self.usual_s, self.far_s, float(self.interval)]
        words += [float(self.count), float(self.lived), float(self.is_step_tried), self.careful_below_s]
        words += _words(None if self.is_step_first else self.step) + _words(self.step if self.is_step_first else None)
        for tier in self.tiers:
            words += _words(tier.bound if tier.is_measured else None, tier.usual_s)
        return words

    def agreed(self, worst: Sequence[float]) -> Sample:
        """What all ranks know, from the element-wise maximum of their `numbers`. Raises ValueError: other tiers."""
        if len(worst) != len(self.numbers()):
            raise ValueError("the ranks were given different tiers: give every IterManager the same")
        remaining_s, at_once_s, usual_s, far_s, interval, count, lived, is_tried, careful_s = worst[:_COMMON]
        step, first, *of_tiers = (tuple(worst[at : at + _WORDS]) for at in range(_COMMON, len(worst), _WORDS))
        tiers = tuple(
            tier if words[0] < 0.0 else SaveTarget(tier.name, _worst(tier.bound, words), words[-1])
            for tier, words in zip(self.tiers, of_tiers, strict=True)
        )
        own_step = self.step or Bound(0.0, 0.0, False, 0, "no iteration was measured yet")
        is_first = step[0] < 0.0 <= first[0]
        known = first if is_first else step
        return replace(
            self,
            remaining_s=-remaining_s,
            usual_s=usual_s,
            step=None if known[0] < 0.0 else _worst(own_step, known),
            far_s=far_s,
            interval=min(int(interval), steps_to_half(-remaining_s, usual_s)),
            tiers=tiers,
            count=int(count),
            lived=int(lived),
            at_once_s=-at_once_s,
            is_step_first=is_first,
            is_step_tried=bool(is_tried),
            careful_below_s=careful_s,
        )


def _words(bound: Bound | None, usual_s: float | None = None) -> list[float]:
    """A bound as numbers, the larger the worse; None: this rank does not know it."""
    if bound is None:
        return list(_NOT_MEASURED)
    return [bound.seconds, float(not bound.is_assured), -bound.margin_s, bound.seconds if usual_s is None else usual_s]


def _worst(own: Bound, words: Sequence[float]) -> Bound:
    """The bound of all ranks, from `_words`; the own one, if it is the same."""
    seconds, is_guess, less_margin_s, _ = words
    if seconds == own.seconds and bool(is_guess) is not own.is_assured and -less_margin_s == own.margin_s:
        return own
    samples = max(1, own.samples)  # another rank has measured it, if this one has not
    because = "the longest of all ranks' bounds"
    return Bound(seconds, own.confidence, not is_guess, samples, because, -less_margin_s)
