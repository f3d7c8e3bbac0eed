"""What is measured while the run goes on, what Young/Daly makes of it, and its formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy import (
    FailurePrior,
    FailureRate,
    SaveCosts,
    SaveMoment,
    YoungDaly,
    daly_period_s,
    exact_cost,
)
from torchelastic.checkpoint.policy.costs import MARGIN, Bound, upper_bound

MOMENT = SaveMoment(step=101, now_s=60.0, last_saved_step=100, last_saved_s=50.0, began_s=0.0)


def with_cost(stall_s: float, durable_s: float | None = None, slowed_s: float = 0.0) -> SaveCosts:
    durable_s = stall_s if durable_s is None else durable_s
    return SaveCosts().observed("durable", stall_s=stall_s, durable_s=durable_s, slowed_s=slowed_s)


def durable_bound(costs: SaveCosts, *, confidence: float = 0.99, margin: float = MARGIN) -> Bound | None:
    cost = costs.of("durable")
    times_s = () if cost is None else cost.recent_durable_s
    return upper_bound(times_s, confidence, margin=margin, what="saves to 'durable'")


# --- costs ------------------------------------------------------------------------------------------------------------


def test_the_first_saves_are_averaged_and_later_ones_weighted() -> None:
    costs = SaveCosts(weight=0.5)
    for stall_s, mean_s in ((4.0, 4.0), (2.0, 3.0), (1.0, 2.0), (0.0, 1.0)):
        costs = costs.observed("durable", stall_s=stall_s, durable_s=10.0 * stall_s, slowed_s=2.0 * stall_s)
        tier = costs.of("durable")
        assert tier is not None
        assert (tier.stall_s, tier.durable_s, tier.slowed_s) == (mean_s, 10.0 * mean_s, 2.0 * mean_s)
        assert tier.cost_s == 3.0 * mean_s
    assert tier is not None
    assert tier.saves == 4


@pytest.mark.parametrize(
    ("confidence", "saves", "rank"),
    [(0.99, 99, 99), (0.95, 19, 19), (0.9, 9, 9), (0.9, 20, 19), (0.5, 4, 3), (0.9, 99, 90)],
)
def test_the_bound_is_the_conformal_rank_of_the_saves(confidence: float, saves: int, rank: int) -> None:
    costs = SaveCosts()
    for durable_s in random.Random(0).sample(range(1, saves + 1), saves):
        costs = costs.observed("durable", stall_s=0.0, durable_s=float(durable_s))
    bound = durable_bound(costs, confidence=confidence)
    assert bound is not None
    assert (bound.seconds, bound.is_assured, bound.samples) == (rank, True, saves)


@pytest.mark.parametrize(("confidence", "needed"), [(0.99, 99), (0.95, 19), (0.9, 9), (0.5, 1)])
def test_with_too_few_saves_the_bound_is_the_longest_with_a_margin_and_says_so(confidence: float, needed: int) -> None:
    costs = SaveCosts()
    for save in range(needed):
        bound = durable_bound(costs, confidence=confidence, margin=2.0)
        if save:
            assert bound is not None
            assert not bound.is_assured
            assert save < bound.seconds <= 2.0 * save
            assert (bound.seconds == 2.0 * save) is (save == 1), "the margin is for one, and smaller for more"
            assert f"only {save} saves" in bound.because
            assert f"takes {needed}: " in bound.because
        else:
            assert bound is None
        costs = costs.observed("durable", stall_s=0.0, durable_s=save + 1.0)
    enough = durable_bound(costs, confidence=confidence)
    assert enough is not None
    assert enough.is_assured


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SaveCosts(weight=0.0), "weight is 0.0"),
        (lambda: SaveCosts(weight=math.nan), "weight is nan"),
        (lambda: SaveCosts(window=0), "window is 0"),
        (lambda: with_cost(-1.0), "stall_s is -1.0: give seconds, 0 or more"),
        (lambda: with_cost(0.0, math.nan), "durable_s is nan"),
        (lambda: with_cost(0.0, slowed_s=math.inf), "slowed_s is inf"),
        (lambda: SaveCosts().observed("", stall_s=0.0, durable_s=0.0), "tier is empty"),
        (lambda: durable_bound(with_cost(1.0), confidence=1.0), "confidence is 1.0"),
        (lambda: durable_bound(with_cost(1.0), margin=0.5), "margin is 0.5"),
        (lambda: FailurePrior(0.0, 1.0), "failures is 0.0: .*above 0"),
        (lambda: FailurePrior(1.0, math.nan), "seconds is nan"),
        (lambda: FailureRate(seconds=-1.0), "seconds is -1.0"),
        (lambda: FailureRate(failures={"job": -1}), "failures\\['job'\\] is -1"),
        (lambda: FailureRate().observed(-1.0), "seconds is -1.0"),
        (lambda: FailureRate().failed(""), "failure_class is empty"),
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


# --- failures ---------------------------------------------------------------------------------------------------------


def test_the_rate_is_the_posterior_mean() -> None:
    rate = FailureRate(FailurePrior(1.0, 100.0))
    assert rate.per_second() == 1 / 100
    rate = rate.observed(50.0).failed("process").observed(150.0).failed("process").failed("host")
    assert rate.per_second() == (1 + 3) / (100 + 200)
    assert rate.per_second({"host"}) == (1 + 1) / (100 + 200)
    assert rate.per_second({"host", "process"}) == rate.per_second()
    assert rate.per_second({"job"}) == 1 / 300
    assert rate.mtbf_s({"process"}) == pytest.approx(100.0)
    assert rate.per_second(prior=FailurePrior(3.0, 400.0)) == (3 + 3) / (400 + 200)


def test_without_failures_it_gets_rarer_and_with_each_one_more_frequent() -> None:
    calm = FailureRate()
    assert calm.mtbf_s() == 4 * 3600.0
    assert calm.observed(3600.0).mtbf_s() == 8 * 3600.0
    assert calm.failed("host").mtbf_s() < calm.mtbf_s() / 4


# --- Young/Daly -------------------------------------------------------------------------------------------------------


def test_the_period_is_dalys_of_the_measured_cost_and_rate() -> None:
    failures = FailureRate(FailurePrior(1.0, 3600.0)).observed(82_800.0)  # one a day
    moment = replace(MOMENT, costs=with_cost(250.0, 250.0, slowed_s=50.0), failures=failures, step_s=2.0)
    numbers = YoungDaly(max_s=1e5).decide(moment).numbers
    assert numbers["cost_s"] == 300.0
    assert numbers["mtbf_s"] == 86_400.0
    assert numbers["period_s"] == daly_period_s(300.0, 86_400.0) == pytest.approx(116.69 * 60.0, abs=1.0)
    assert numbers["due_in_s"] == numbers["period_s"] + 250.0 - 10.0, "the stall of the save comes on top"
    assert numbers["waste_saving"] == 300.0 / numbers["period_s"]
    assert numbers["waste_repeating"] == numbers["period_s"] / (2 * 86_400.0)
    assert numbers["waste"] == 1 - 1 / exact_cost(numbers["period_s"], 300.0, 86_400.0)
    assert numbers["waste"] == pytest.approx(numbers["waste_saving"] + numbers["waste_repeating"], rel=0.05)
    assert numbers["period_steps"] == numbers["period_s"] / 2.0


def test_it_is_due_when_the_period_and_the_stall_have_passed() -> None:
    failures = FailureRate(FailurePrior(1.0, 50.0))
    policy = YoungDaly(min_s=0.0)
    period_s = daly_period_s(1.0, 50.0)  # 9.7 s
    begun = replace(MOMENT, costs=with_cost(1.0), failures=failures)
    assert not policy.decide(replace(begun, now_s=50.0 + period_s + 0.99))
    assert policy.decide(replace(begun, now_s=50.0 + period_s + 1.01))
    never_saved = replace(begun, last_saved_step=None, last_saved_s=None, began_s=50.0)
    assert policy.decide(replace(never_saved, now_s=50.0 + period_s + 0.01))


@pytest.mark.parametrize(
    ("policy", "costs", "period_s", "word"),
    [
        (YoungDaly(min_s=500.0), with_cost(2.0), 500.0, "(min_s)"),
        (YoungDaly(max_s=60.0), with_cost(2.0), 60.0, "(max_s)"),
        (YoungDaly(), with_cost(2.0, durable_s=302.0), 300.0, "(until the save before is durable)"),
        (YoungDaly(max_s=200.0), with_cost(2.0, durable_s=302.0), 200.0, "(max_s)"),
    ],
)
def test_the_period_is_held_by_its_bounds_and_by_the_time_a_save_takes(
    policy: YoungDaly, costs: SaveCosts, period_s: float, word: str
) -> None:
    moment = replace(MOMENT, costs=costs, failures=FailureRate(FailurePrior(1.0, 10_000.0)))
    decision = policy.decide(moment)
    assert decision.numbers["period_s"] == period_s
    assert word in decision.because


def test_only_the_failures_that_the_tier_repairs_count_and_its_own_prior() -> None:
    failures = FailureRate(FailurePrior(1.0, 1000.0)).observed(9000.0)
    for _ in range(9):
        failures = failures.failed("process")
    moment = replace(MOMENT, costs=with_cost(1.0), failures=failures)
    assert YoungDaly().decide(moment).numbers["mtbf_s"] == 1000.0
    assert YoungDaly(failure_classes=["job"]).decide(moment).numbers["mtbf_s"] == 10_000.0
    assert YoungDaly(prior=FailurePrior(1.0, 31_000.0)).decide(moment).numbers["mtbf_s"] == 4000.0


@given(st.floats(0.0, 100.0), st.floats(1.0, 1e6), st.integers(1, 50))
def test_more_failures_never_give_a_longer_period_while_a_save_is_cheap(
    cost_s: float, mtbf_s: float, more: int
) -> None:
    rate = FailureRate(FailurePrior(1.0, mtbf_s))
    worse = rate
    for _ in range(more):
        worse = worse.failed("host")
    if cost_s >= 2 * worse.mtbf_s():
        return  # beyond Daly's formula; see daly_period_s
    policy = YoungDaly(min_s=0.0, max_s=1e9)
    moment = replace(MOMENT, costs=with_cost(cost_s))
    often = policy.decide(replace(moment, failures=worse)).numbers
    seldom = policy.decide(replace(moment, failures=rate)).numbers
    assert often["period_s"] <= seldom["period_s"] * (1 + 1e-9)


# --- the formulas, against the figures of their papers and against numeric optima -------------------------------------

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
