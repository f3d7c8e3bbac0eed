"""How often to save, as mathematics: every function is pure, and names the paper that it is from.

Notation: C is what a save costs the training, M the mean time between failures, R the time to restore, all in seconds.
A period is the training *between* two saves; only where it says so, the save itself is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torchelastic.checkpoint.policy.arguments import real_number, whole_number

_COST = "give the seconds of training that a save costs, 0 or more"
_MTBF = "give the mean seconds between two failures, above 0 (infinity: never)"
_RESTORE = "give the seconds that a restore takes, 0 or more"

_FLOPS_PER_PARAMETER_AND_SAMPLE = 6.0  # a multiply and an add: 2 in the forward pass, 4 in the backward pass


def young_period_s(cost_s: float, mtbf_s: float) -> float:
    """The best period to the first order: sqrt(2 C M).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).

    Args:
        cost_s: C.
        mtbf_s: M; infinity is accepted.

    Raises:
        ValueError: C is negative, M is not above 0, or one of them is NaN.

    >>> round(young_period_s(cost_s=0.02, mtbf_s=60.0), 2)
    1.55
    """
    cost_s, mtbf_s = _cost_and_mtbf(cost_s, mtbf_s)
    return math.sqrt(2.0 * cost_s * mtbf_s) if cost_s else 0.0


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


def availability_optimal_period_s(cost_s: float, mtbf_s: float, restore_s: float = 0.0) -> float:
    """The time from save to save, *the save included*, of the best availability: C + sqrt(2 (M + R) C + C^2).

    It is where (T - C)/T x M/(M + R + T/2) is largest, and equals Young's where C is small against R, and R against M.
    Where damage is found later than this period, a longer one is right: keep copies that are older than the damage.

    Source: N. R. Saxena et al., "Optimal checkpoint interval with availability as an objective function", arXiv
    2410.18124 (2024).

    Args:
        cost_s: C.
        mtbf_s: M; infinity is accepted.
        restore_s: R.

    Raises:
        ValueError: C or R is negative, M is not above 0, or one of them is NaN.

    >>> availability_optimal_period_s(cost_s=3.0, mtbf_s=10.0, restore_s=2.0)
    12.0
    """
    cost_s, mtbf_s = _cost_and_mtbf(cost_s, mtbf_s)
    restore_s = real_number("restore_s", restore_s, remedy=_RESTORE)
    if cost_s == 0.0:
        return 0.0
    return cost_s + math.sqrt(2.0 * (mtbf_s + restore_s) * cost_s + cost_s * cost_s)


def periods_per_tier(cost_s: Mapping[str, float], rate_per_s: Mapping[str, float]) -> dict[str, float]:
    """The best period of each tier where several save side by side: sqrt(2 C_i / rate_i), each for itself.

    Each failure belongs to the cheapest tier that repairs it; then the waste is the sum of C_i/t_i + rate_i t_i/2 over
    the tiers, to the first order, and its terms do not touch each other. A tier that nothing fails onto has an infinite
    period.

    Source: Young's formula (see `young_period_s`), once per tier.

    Args:
        cost_s: what a save to the tier costs, by tier, in seconds.
        rate_per_s: failures per second that only this tier repairs, by tier.

    Returns:
        Seconds between two saves, by tier.

    Raises:
        ValueError: the two do not name the same tiers, or a value is negative or NaN.

    >>> periods_per_tier({"memory": 0.02, "durable": 4.0}, {"memory": 1 / 400, "durable": 1 / 80_000})
    {'memory': 4.0, 'durable': 800.0}
    """
    if set(cost_s) != set(rate_per_s):
        lone = sorted(set(cost_s) ^ set(rate_per_s))
        raise ValueError(f"cost_s and rate_per_s do not both name the tiers {lone}: give each tier a cost and a rate")
    periods = {}
    for tier, cost in cost_s.items():
        remedy = "give failures per second, 0 or more"
        rate = real_number(f"rate_per_s[{tier!r}]", rate_per_s[tier], remedy=remedy)
        cost = real_number(f"cost_s[{tier!r}]", cost, remedy=_COST)
        periods[tier] = math.sqrt(2.0 * cost / rate) if rate else math.inf
    return periods


def copy_share(
    state_bytes_per_parameter: float,
    flops_per_s: float,
    copy_bytes_per_s: float,
    samples_per_step: float,
    sharding: int = 1,
) -> float:
    """Time to copy the state over time to compute a step: (b/6) F / (B T S). Below 1 it can hide behind the step.

    The number of parameters cancels out: the state has b bytes per parameter, and a step computes 6 operations per
    parameter and sample (Kaplan et al., arXiv 2001.08361). The rule is our own; with the bandwidth of the network it
    tells whether every step can be replicated, with that of the disk whether it can be made durable.

    Args:
        state_bytes_per_parameter: b; 12 for fp32 with AdamW, 14 to 16 with mixed precision.
        flops_per_s: F, what one worker achieves.
        copy_bytes_per_s: B, of one worker.
        samples_per_step: T, samples (tokens) per worker and step.
        sharding: S, over how many workers the state is split.

    Raises:
        ValueError: an argument is not above 0, or NaN.

    >>> round(copy_share(12, flops_per_s=50e9, copy_bytes_per_s=5.6e9, samples_per_step=1800), 4)  # two CPU cores
    0.0099
    """
    remedy = "give a number above 0"
    state_bytes = real_number("state_bytes_per_parameter", state_bytes_per_parameter, above=0.0, remedy=remedy)
    flops = real_number("flops_per_s", flops_per_s, above=0.0, remedy=remedy)
    bandwidth = real_number("copy_bytes_per_s", copy_bytes_per_s, above=0.0, remedy=remedy)
    samples = real_number("samples_per_step", samples_per_step, above=0.0, remedy=remedy)
    shards = whole_number("sharding", sharding, at_least=1, remedy="give the number of workers that share the state")
    return state_bytes / _FLOPS_PER_PARAMETER_AND_SAMPLE * flops / (bandwidth * samples * shards)


def least_interval_steps(write_s: float, step_s: float, *, in_flight: int = 1, slowdown: float = 1.05) -> int:
    """The fewest steps between two saves at which the writers keep up: f >= Tw / (N q t), rounded up, at least 1.

    Source: F. Strati, M. Friedman, A. Klimovic, "PCcheck: Persistent concurrent checkpointing for ML", ASPLOS 2025.

    Args:
        write_s: Tw, the longest time from the beginning of a save until it is durable.
        step_s: t, the time of a step without saves.
        in_flight: N, how many saves may be under way at the same time.
        slowdown: q, how much longer a step may take because of them; 1.05 allows 5 %.

    Raises:
        ValueError: `write_s` is negative, `step_s` is not above 0, `in_flight` is below 1, `slowdown` is below 1.

    >>> least_interval_steps(write_s=12.0, step_s=0.5, in_flight=2)
    12
    """
    write_s = real_number("write_s", write_s, remedy="give the seconds until a save is durable, 0 or more")
    step_s = real_number("step_s", step_s, above=0.0, remedy="give the seconds of a step, above 0")
    in_flight = whole_number("in_flight", in_flight, at_least=1, remedy="give how many saves may run at once")
    slowdown = real_number("slowdown", slowdown, remedy="give a factor of at least 1, for example 1.05")
    if slowdown < 1.0:
        raise ValueError(f"slowdown is {slowdown}: give a factor of at least 1, for example 1.05 for 5 %")
    return max(1, math.ceil(write_s / (in_flight * slowdown * step_s)))


def _cost_and_mtbf(cost_s: float, mtbf_s: float) -> tuple[float, float]:
    return (
        real_number("cost_s", cost_s, remedy=_COST),
        real_number("mtbf_s", mtbf_s, above=0.0, or_inf=True, remedy=_MTBF),
    )
