"""The learning rate as a pure function of the iteration, so that a life that resumes has nothing to restore."""

from __future__ import annotations

import math


def learning_rate(iteration: int, *, peak: float, lowest: float, warmup_iters: int, decay_iters: int) -> float:
    """Linear warm-up to `peak`, half a cosine down to `lowest`, and `lowest` from `decay_iters` on.

    Warm-up: arXiv:1706.02677 section 2.2; cosine: arXiv:1608.03983 equation 5 with a single period.

    Args:
        iteration: from 0.
        peak: reached at `warmup_iters`.
        lowest: the end of the cosine.
        warmup_iters: iterations of warm-up; the first already moves.
        decay_iters: the iteration at which the cosine ends.
    """
    if iteration < warmup_iters:
        return peak * (iteration + 1) / (warmup_iters + 1)
    if iteration >= decay_iters:
        return lowest
    progress = (iteration - warmup_iters) / (decay_iters - warmup_iters)
    return lowest + 0.5 * (peak - lowest) * (1 + math.cos(math.pi * progress))
