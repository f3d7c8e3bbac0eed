"""The learning rate as a pure function of the committed step.

Nothing here is state: a worker that joins at step k, or repeats step k after a failure, computes the rate that every
other worker computes, and a checkpoint has nothing to carry.
"""

from __future__ import annotations

import math


def learning_rate(step: int, *, total_steps: int, peak: float, warmup_steps: int) -> float:
    """Linear warm-up to ``peak``, then half a cosine towards zero.

    Warm-up: arXiv:1706.02677 section 2.2; cosine: arXiv:1608.03983 equation 5 with a single period.

    Args:
        step: committed steps so far, from 0.
        total_steps: steps of the whole run; the rate stays at its last value beyond them.
        peak: highest rate, reached at step ``warmup_steps``.
        warmup_steps: steps of warm-up, below ``total_steps``; the first already moves (rate peak / warmup_steps).

    Raises:
        ValueError: for a negative step, a run without steps, or a warm-up that leaves no step after it.
    """
    if step < 0 or total_steps < 1 or not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"need step >= 0 and 0 <= warmup_steps < total_steps, not step {step}, warm-up {warmup_steps}, "
            f"total {total_steps}"
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (min(step, total_steps - 1) - warmup_steps) / (total_steps - warmup_steps)
    return 0.5 * peak * (1 + math.cos(math.pi * progress))
