"""The formulas against the figures of their papers, and against numeric optima."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy import (
    daly_period_s,
    exact_cost,
)

HOUR = 60.0  # the papers reckon in minutes, and the formulas take any unit


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum is least, by golden section over the logarithm."""
    low, high = math.log(low), math.log(high)
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(120):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(math.exp(left)) <= function(math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2.0)


@pytest.mark.parametrize(("mtbf", "period"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15.0, 9.1)])
def test_daly_gives_the_figures_of_the_paper(mtbf: float, period: float) -> None:
    assert daly_period_s(5.0, mtbf) == pytest.approx(period, abs=0.5 if period > 10 else 0.05)


@pytest.mark.parametrize(("restore_s", "progress"), [(2.0, 0.943), (0.1, 0.973)])
def test_our_fault_tests_have_these_limits(restore_s: float, progress: float) -> None:
    best = least(lambda period: exact_cost(period, 0.02, 60.0, restore_s), 1e-3, 60.0)
    assert best == pytest.approx(1.54, abs=0.01)
    assert 1 / exact_cost(best, 0.02, 60.0, restore_s) == pytest.approx(progress, abs=0.001)


@given(st.floats(1e-6, 1.6), st.floats(1e-2, 1e7), st.floats(0.0, 5.0))
def test_daly_is_within_a_thousandth_of_the_numeric_optimum(ratio: float, mtbf_s: float, restores: float) -> None:
    cost_s, restore_s = ratio * mtbf_s, restores * mtbf_s
    best = least(lambda period: exact_cost(period, cost_s, mtbf_s, restore_s), 1e-5 * mtbf_s, 2 * mtbf_s)
    optimum = exact_cost(best, cost_s, mtbf_s, restore_s)
    assert exact_cost(daly_period_s(cost_s, mtbf_s), cost_s, mtbf_s, restore_s) <= optimum * 1.001


def test_at_the_edges_the_formulas_stay_numbers() -> None:
    assert daly_period_s(0.0, 60.0) == daly_period_s(0.0, math.inf) == 0.0
    assert daly_period_s(1.0, math.inf) == math.inf
    assert daly_period_s(2.0, 1.0) == 1.0
    assert daly_period_s(200.0, 1.0) == 1.0
    assert exact_cost(1.0, 1e9, 1e-3) == math.inf
    assert exact_cost(9.0, 1.0, math.inf) == 10 / 9


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: daly_period_s(-1.0, 1.0), "cost_s is -1.0: give the seconds of training that a save costs"),
        (lambda: daly_period_s(math.nan, 1.0), "cost_s is nan"),
        (lambda: daly_period_s(math.inf, 1.0), "cost_s is inf"),
        (lambda: daly_period_s(1.0, 0.0), "mtbf_s is 0.0: .*above 0"),
        (lambda: daly_period_s(1.0, math.nan), "mtbf_s is nan"),
        (lambda: exact_cost(0.0, 1.0, 1.0), "period_s is 0.0"),
        (lambda: exact_cost(1.0, 1.0, 1.0, -1.0), "restore_s is -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
