"""How often to save, as mathematics: every function is pure, and names the paper that it is from.

Notation: C is what a save costs the training, M the mean time between failures, R the time to restore, all in seconds.
A period is the training *between* two saves; only where it says so, the save itself is part of it.
"""

from __future__ import annotations

import math

from torchelastic.checkpoint.policy.arguments import real_number

_COST = "give the seconds of training that a save costs, 0 or more"
_MTBF = "give the mean seconds between two failures, above 0 (infinity: never)"
_RESTORE = "give the seconds that a restore takes, 0 or more"


def daly_period_s(cost_s: float, mtbf_s: float) -> float:
    """The best period to a higher order; M where a save costs more than 2 M.

    The wall time that it leads to is within 0.1 % of the least possible one (`exact_cost`) as long as C is below 1.6 M,
    and within 0.2 % always. It grows with C, and with M too, except that at C = 2 M it jumps from 0.89 M to M.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006): sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C.

    Args:
        cost_s: C.
        mtbf_s: M; infinity is accepted.

    Raises:
        ValueError: C is negative, M is not above 0, or one of them is NaN.

    >>> [round(daly_period_s(5.0, mtbf), 1) for mtbf in (24 * 60.0, 6 * 60.0, 15.0)]  # in minutes; the paper's figures
    [116.7, 56.7, 9.1]
    """
    cost_s, mtbf_s = _cost_and_mtbf(cost_s, mtbf_s)
    if cost_s == 0.0:
        return 0.0
    ratio = cost_s / (2.0 * mtbf_s)
    if ratio >= 1.0:
        return mtbf_s
    period_s = math.sqrt(2.0 * cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s
    return max(0.0, period_s)  # a cost of next to nothing is rounded


def exact_cost(period_s: float, cost_s: float, mtbf_s: float, restore_s: float = 0.0) -> float:
    """Expected wall time per second of progress, for failures with exponential gaps: M e^(R/M) (e^((t+C)/M) - 1) / t.

    1 would be perfect; one over it is the share of the time that is progress. Infinite where nothing ever finishes.

    Source: Daly 2006 (see `daly_period_s`), the complete cost function.

    Args:
        period_s: t, the training between two saves.
        cost_s: C.
        mtbf_s: M; infinity is accepted.
        restore_s: R.

    Raises:
        ValueError: the period or M is not above 0, C or R is negative, or one of them is NaN.

    >>> round(1 / exact_cost(1.5, cost_s=0.02, mtbf_s=60.0, restore_s=0.1), 3)
    0.973
    """
    period_s = real_number("period_s", period_s, above=0.0, remedy="give the seconds of training between two saves")
    cost_s, mtbf_s = _cost_and_mtbf(cost_s, mtbf_s)
    restore_s = real_number("restore_s", restore_s, remedy=_RESTORE)
    if math.isinf(mtbf_s):
        return (period_s + cost_s) / period_s
    try:
        return mtbf_s * math.exp(restore_s / mtbf_s) * math.expm1((period_s + cost_s) / mtbf_s) / period_s
    except OverflowError:
        return math.inf


def _cost_and_mtbf(cost_s: float, mtbf_s: float) -> tuple[float, float]:
    return (
        real_number("cost_s", cost_s, remedy=_COST),
        real_number("mtbf_s", mtbf_s, above=0.0, or_inf=True, remedy=_MTBF),
    )
