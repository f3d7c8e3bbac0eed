"""The formulas against the figures of their papers, and against numeric optima."""

from __future__ import annotations

import doctest
import importlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy import (
    availability_optimal_period_s,
    copy_share,
    daly_period_s,
    exact_cost,
    least_interval_steps,
    periods_per_tier,
    young_period_s,
)

HOUR = 60.0  # the papers reckon in minutes, and the formulas take any unit
MODULES = ("formulas", "costs", "failures", "saving", "schedules", "keeping", "young_daly")


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


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_hold(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"torchelastic.checkpoint.policy.{module}")).failed == 0


# --- Young and Daly ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf", "period"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15.0, 9.1)])
def test_daly_gives_the_figures_of_the_paper(mtbf: float, period: float) -> None:
    assert daly_period_s(5.0, mtbf) == pytest.approx(period, abs=0.5 if period > 10 else 0.05)


def test_young_by_hand() -> None:
    assert young_period_s(2.0, 100.0) == 20.0
    assert young_period_s(0.02, 60.0) == pytest.approx(1.549, abs=0.001)


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


@given(st.floats(1.6, 50.0), st.floats(1e-2, 1e7))
def test_daly_is_within_two_thousandths_where_a_save_is_dearer_than_the_mtbf(ratio: float, mtbf_s: float) -> None:
    best = least(lambda period: exact_cost(period, ratio * mtbf_s, mtbf_s), 1e-5 * mtbf_s, 2 * mtbf_s)
    reached = exact_cost(daly_period_s(ratio * mtbf_s, mtbf_s), ratio * mtbf_s, mtbf_s)
    assert reached <= exact_cost(best, ratio * mtbf_s, mtbf_s) * 1.002


def test_young_loses_where_saves_are_dear_as_the_reference_says() -> None:
    cost, mtbf = 0.08, 1.0
    best = least(lambda period: exact_cost(period, cost, mtbf), 1e-3, 2.0)
    lost = 1 / exact_cost(best, cost, mtbf) - 1 / exact_cost(young_period_s(cost, mtbf), cost, mtbf)
    assert lost == pytest.approx(0.0022, abs=0.0001)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e5), st.floats(1e-3, 1e7))
def test_a_dearer_save_never_gives_a_shorter_period(cost_s: float, more_s: float, mtbf_s: float) -> None:
    restore_s = 1.0
    for period in (
        young_period_s,
        daly_period_s,
        lambda cost, mtbf: availability_optimal_period_s(cost, mtbf, restore_s),
    ):
        assert period(cost_s + more_s, mtbf_s) >= period(cost_s, mtbf_s) * (1 - 1e-9)


@given(st.floats(0.0, 1e6), st.floats(1e-3, 1e7))
def test_daly_is_shorter_than_young_and_never_longer_than_the_mtbf(cost_s: float, mtbf_s: float) -> None:
    period_s = daly_period_s(cost_s, mtbf_s)
    assert 0.0 <= period_s <= min(young_period_s(cost_s, mtbf_s), mtbf_s) * (1 + 1e-9)


def test_at_the_edges_the_formulas_stay_numbers() -> None:
    assert daly_period_s(0.0, 60.0) == young_period_s(0.0, math.inf) == daly_period_s(0.0, math.inf) == 0.0
    assert daly_period_s(1.0, math.inf) == young_period_s(1.0, math.inf) == math.inf
    assert daly_period_s(2.0, 1.0) == 1.0
    assert daly_period_s(200.0, 1.0) == 1.0
    assert exact_cost(1.0, 1e9, 1e-3) == math.inf
    assert exact_cost(9.0, 1.0, math.inf) == 10 / 9


# --- availability, tiers, copies, writers -----------------------------------------------------------------------------


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e6), st.floats(0.0, 1e4))
def test_the_availability_optimum_is_one(cost_s: float, mtbf_s: float, restore_s: float) -> None:
    def unavailable(cycle_s: float) -> float:
        return -(cycle_s - cost_s) / cycle_s * mtbf_s / (mtbf_s + restore_s + cycle_s / 2)

    best = availability_optimal_period_s(cost_s, mtbf_s, restore_s)
    assert unavailable(best) <= unavailable(best * 1.01)
    assert unavailable(best) <= unavailable(max(cost_s, best * 0.99))


def test_the_availability_optimum_is_youngs_where_saves_and_restores_are_cheap() -> None:
    assert availability_optimal_period_s(0.001, 1e6, 1.0) == pytest.approx(young_period_s(0.001, 1e6), rel=1e-3)
    assert availability_optimal_period_s(0.0, 60.0) == 0.0


COSTS = {"own": 0.02, "peer": 0.5, "disk": 30.0}
RATES = {"own": 1e-2, "peer": 1e-4, "disk": 1e-6}


def test_each_tier_has_youngs_period_of_its_own_failures() -> None:
    periods = periods_per_tier(COSTS, RATES)
    assert periods == pytest.approx({"own": 2.0, "peer": 100.0, "disk": 7745.97}, rel=1e-5)
    assert periods_per_tier({"disk": 1.0}, {"disk": 0.0}) == {"disk": math.inf}


@given(st.fixed_dictionaries({tier: st.floats(0.5, 2.0) for tier in COSTS}))
def test_no_other_periods_of_the_tiers_waste_less(factors: dict[str, float]) -> None:
    def waste(periods: dict[str, float]) -> float:
        return sum(COSTS[tier] / period + RATES[tier] * period / 2 for tier, period in periods.items())

    best = periods_per_tier(COSTS, RATES)
    assert waste(best) <= waste({tier: period * factors[tier] for tier, period in best.items()}) * (1 + 1e-12)


def test_the_share_of_a_copy_on_the_machines_of_the_reference() -> None:
    assert copy_share(12, 50e9, 5.6e9, 1) == pytest.approx(18, abs=0.2)  # two CPU cores
    assert copy_share(12, 50e9, 5.6e9, 1800) < 0.01 < copy_share(12, 50e9, 5.6e9, 1700)
    assert copy_share(16, 400e12, 50e9, 1) == pytest.approx(21_000, rel=0.02)  # a GPU
    assert copy_share(16, 400e12, 50e9, 21_400) < 1.0 < copy_share(16, 400e12, 50e9, 21_300)
    assert copy_share(16, 400e12, 50e9, 2.1e6) == pytest.approx(0.01, rel=0.02)
    assert copy_share(16, 400e12, 50e9, 21_400, sharding=8) == copy_share(16, 400e12, 50e9, 21_400) / 8


def test_the_writers_keep_up_from_this_interval_on() -> None:
    assert least_interval_steps(10.0, 1.0, slowdown=1.0) == 10
    assert least_interval_steps(10.0, 1.0, slowdown=1.05) == 10
    assert least_interval_steps(10.0, 1.0, slowdown=1.25) == 8
    assert least_interval_steps(10.0, 1.0, in_flight=4, slowdown=1.0) == 3
    assert least_interval_steps(0.0, 1.0) == 1


@given(st.floats(0.0, 1e4), st.floats(1e-3, 1e2), st.integers(1, 8), st.floats(1.0, 3.0))
def test_one_step_less_would_be_too_few(write_s: float, step_s: float, in_flight: int, slowdown: float) -> None:
    steps = least_interval_steps(write_s, step_s, in_flight=in_flight, slowdown=slowdown)
    assert steps * in_flight * slowdown * step_s >= write_s * (1 - 1e-9)
    assert steps == 1 or (steps - 1) * in_flight * slowdown * step_s < write_s


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: young_period_s(-1.0, 1.0), "cost_s is -1.0: give the seconds of training that a save costs"),
        (lambda: daly_period_s(math.nan, 1.0), "cost_s is nan"),
        (lambda: daly_period_s(math.inf, 1.0), "cost_s is inf"),
        (lambda: daly_period_s(1.0, 0.0), "mtbf_s is 0.0: .*above 0"),
        (lambda: daly_period_s(1.0, math.nan), "mtbf_s is nan"),
        (lambda: exact_cost(0.0, 1.0, 1.0), "period_s is 0.0"),
        (lambda: exact_cost(1.0, 1.0, 1.0, -1.0), "restore_s is -1.0"),
        (lambda: availability_optimal_period_s(1.0, 1.0, math.nan), "restore_s is nan"),
        (lambda: periods_per_tier({"a": 1.0}, {"b": 1.0}), r"tiers \['a', 'b'\]: give each tier"),
        (lambda: periods_per_tier({"a": 1.0}, {"a": -1.0}), r"rate_per_s\['a'\] is -1.0"),
        (lambda: copy_share(12, 0.0, 1.0, 1.0), "flops_per_s is 0.0"),
        (lambda: copy_share(12, 1.0, 1.0, 1.0, sharding=0), "sharding is 0"),
        (lambda: least_interval_steps(1.0, 0.0), "step_s is 0.0"),
        (lambda: least_interval_steps(1.0, 1.0, in_flight=0), "in_flight is 0"),
        (lambda: least_interval_steps(1.0, 1.0, slowdown=0.9), "slowdown is 0.9"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
