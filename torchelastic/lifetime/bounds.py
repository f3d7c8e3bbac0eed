"""How long something takes at most, from how long it took before: with a stated confidence, and on how many samples.

Two questions, two bounds. "How long will the next save take?" is answered by `upper_bound`. "When a moment comes that
does not care for our steps, how long until the step that is running then is over?" is answered by `step_bound`: a
moment is more likely to fall into a long step than into a short one, so the answer is longer than that of the first
question wherever steps differ (the inspection paradox of renewal theory).

Pure: no clock, no memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number

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
    """

    seconds: float
    confidence: float
    is_assured: bool
    samples: int
    because: str

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
    it is the longest x margin, and says so.

    Source: split conformal prediction; V. Vovk, A. Gammerman, G. Shafer, "Algorithmic learning in a random world"
    (2005); J. Lei et al., "Distribution-free predictive inference for regression", JASA 113 (2018).

    Args:
        durations_s: how long it took, in any order.
        confidence: above 0 and below 1.
        margin: how many times the longest is the guess; at least 1.
        what: the durations, for the reason.

    Raises:
        ValueError: a duration is negative, infinite or NaN, or another argument is out of its range.

    >>> upper_bound([float(second) for second in range(1, 100)], 0.99).seconds
    99.0
    >>> upper_bound([1.0, 2.0]).seconds
    3.0
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


def step_bound(
    durations_s: Sequence[float], confidence: float = 0.99, *, margin: float = MARGIN, what: str = "steps"
) -> Bound | None:
    """How much time to leave for one more step before a given moment; None without any sample.

    Whoever goes on as long as at least b seconds are left runs over the moment only if the step that covers the moment
    b seconds before goes on for longer than b. How long that step still takes is not distributed as the steps are, but
    with the density P(step > y) / mean: the residual life of a renewal process. So b is the smallest for which the
    steps, all together, spent at most a share 1 - confidence of their time beyond their first b seconds; and not less
    than `upper_bound`, since steps of equal length leave no room for the phase to help.

    Source: D. R. Cox, "Renewal theory" (1962), section 5.2. The share is that of the sample: an estimate, where
    `upper_bound` is a theorem.

    Args:
        durations_s: how long the steps took, in any order.
        confidence: above 0 and below 1.
        margin: how many times the longest is the guess, with fewer than `needed_samples`; at least 1.
        what: the durations, for the reason.

    Raises:
        ValueError: as `upper_bound`.

    >>> step_bound([1.0] * 199, 0.99).seconds
    1.0
    >>> step_bound([1.0] * 198 + [41.0], 0.99).seconds > 38.0  # a sixth of all moments fall into the long one
    True
    """
    ordered = _checked(durations_s, confidence, margin)
    alone = upper_bound(ordered, confidence, margin=margin, what=what)
    if alone is None or not alone.is_assured:
        return alone
    residual_s = _residual(ordered, 1.0 - confidence)
    if residual_s <= alone.seconds:
        return alone
    because = (
        f"{what} spent at most {1.0 - confidence:.2g} of their time beyond it, in {alone.samples} {what}: a moment is "
        "more likely to fall into a long one"
    )
    return Bound(residual_s, confidence, True, alone.samples, because)


def guess(seconds: float, because: str, confidence: float = 0.99) -> Bound:
    """A bound that nobody has measured. Raises ValueError if it is negative, infinite or NaN."""
    return Bound(real_number("seconds", seconds, remedy="give seconds, 0 or more"), confidence, False, 0, because)


def _residual(ordered: Sequence[float], share: float) -> float:
    """The smallest b for which the sum of (x - b) over the x above b is at most this share of the sum of all x."""
    allowed = share * math.fsum(ordered)
    longest = list(reversed(ordered))
    for count, total in enumerate(itertools.accumulate(longest), start=1):
        b = (total - allowed) / count
        following = longest[count] if count < len(longest) else 0.0
        if b >= following:
            return max(0.0, b)
    return 0.0  # pragma: no cover - the last b is below 0 by rounding alone, where the share is almost 1


def _from_too_few(ordered: Sequence[float], confidence: float, margin: float, what: str) -> Bound:
    because = (
        f"only {len(ordered)} {what} are known, a confidence of {confidence:.4g} takes {needed_samples(confidence)}: "
        f"{margin:.4g} times the longest"
    )
    return Bound(ordered[-1] * margin, confidence, False, len(ordered), because)


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
