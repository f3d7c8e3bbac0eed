"""Upper bounds of durations from those measured before, with a stated confidence. Pure.

`upper_bound` (of `torchelastic.checkpoint.policy.costs`) is for the next save. `step_bound` is for the step that is
running at a given moment: a moment is more likely to fall into a long step than into a short one, so it is longer
wherever steps differ (the inspection paradox of renewal theory).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.checkpoint.policy.costs import Bound, upper_bound


def step_bound(durations_s: Sequence[float], confidence: float = 0.99, *, what: str = "steps") -> Bound | None:
    """How much time to leave for one more step before a given moment; None without any sample.

    A loop that goes on as long as at least b seconds are left overruns the moment only if the step that covers the
    moment b seconds before takes longer than b more. The rest of that step is not distributed as the steps are, but
    with the density P(step > y) / mean: the residual life of a renewal process. So b is the smallest for which all
    steps together spent at most a fraction 1 - confidence of their time beyond their first b seconds; and not less than
    `upper_bound`, for steps of equal length.

    Source: D. R. Cox, "Renewal theory" (1962), section 5.2. The fraction is that of the sample: an estimate, where
    `upper_bound` is a theorem.

    Args:
        durations_s: how long the steps took, in any order.
        confidence: above 0 and below 1.
        what: the durations, for the reason.

    Raises:
        ValueError: as `upper_bound`.

    >>> step_bound([1.0] * 199, 0.99).seconds
    1.0
    >>> step_bound([1.0] * 198 + [41.0], 0.99).seconds > 38.0  # a sixth of all moments fall into the long one
    True
    """
    alone = upper_bound(durations_s, confidence, what=what)
    if alone is None or not alone.is_assured:
        return alone
    residual_s = _residual(sorted(durations_s), 1.0 - confidence)
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
