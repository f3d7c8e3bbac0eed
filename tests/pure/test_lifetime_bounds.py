from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.policy.costs import Bound, needed_samples, upper_bound
from torchelastic.lifetime.iteration_times import step_bound

seconds = st.floats(0.0, 1e4)
durations = st.lists(seconds, min_size=1, max_size=120)
confidences = st.floats(0.5, 0.99)


def known(bound: Bound | None) -> Bound:
    assert bound is not None
    return bound


@pytest.mark.parametrize(("confidence", "needed"), [(0.99, 99), (0.95, 19), (0.9, 9), (0.995, 199), (0.5, 1)])
def test_a_confidence_takes_so_many_samples(confidence: float, needed: int) -> None:
    assert needed_samples(confidence) == needed
    times = [float(number) for number in range(1, needed + 1)]
    enough = known(upper_bound(times, confidence))
    assert (enough.seconds, enough.is_assured, enough.samples) == (needed, True, needed)
    too_few = upper_bound(times[:-1], confidence)
    if too_few is not None:
        assert not too_few.is_assured
        assert needed - 1 < too_few.seconds < needed, "one sample less makes little difference"
        assert f"only {needed - 1} samples are known" in too_few.because
        assert f"takes {needed}: 1" in too_few.because


def test_the_margin_is_smaller_the_more_samples_there_are() -> None:
    bounds = [known(upper_bound([2.0] * count, 0.99)) for count in range(1, 120)]
    assert (bounds[0].seconds, bounds[0].margin_s) == (3.0, 1.0), "1.5 times the only one"
    few = [bound.seconds for bound in bounds[:99]]
    assert few == sorted(few, reverse=True)
    assert all(bound.margin_s == pytest.approx(bound.seconds - 2.0) for bound in bounds)
    assert {(bound.seconds, bound.margin_s) for bound in bounds[98:]} == {(2.0, 0.0)}


@pytest.mark.parametrize("samples", [1, 3, 10, 40])
def test_with_the_tail_that_the_margin_assumes_the_next_one_keeps_the_bound(samples: int) -> None:
    """Of a Pareto distribution with the index that makes 1.5 right for one sample."""
    index, draw = math.log(50.0) / math.log(1.5), random.Random(samples)
    kept = [
        draw.paretovariate(index) <= known(upper_bound([draw.paretovariate(index) for _ in range(samples)])).seconds
        for _ in range(5000)
    ]
    assert statistics.fmean(kept) == pytest.approx(0.99, abs=0.005)


@given(durations, confidences)
def test_a_step_is_given_no_less_time_than_it_takes_alone_and_no_more_than_the_longest(
    times: list[float], confidence: float
) -> None:
    alone, step = known(upper_bound(times, confidence)), known(step_bound(times, confidence))
    assert alone.seconds <= step.seconds <= max(alone.seconds, max(times)) * (1 + 1e-9)
    assert alone.is_assured is step.is_assured


@given(durations, confidences)
def test_the_steps_spend_no_more_than_the_share_beyond_the_bound(times: list[float], confidence: float) -> None:
    step = known(step_bound(times, confidence))
    if step.is_assured:
        beyond = math.fsum(max(0.0, took - step.seconds) for took in times)
        assert beyond <= (1.0 - confidence) * math.fsum(times) + 1e-6


def test_the_next_one_keeps_the_bound_as_often_as_it_says() -> None:
    generator = random.Random(7)
    kept = 0
    for _ in range(2000):
        times = [generator.lognormvariate(0.0, 1.5) for _ in range(40)]
        kept += times.pop() <= known(upper_bound(times, 0.9)).seconds
    # 39 samples: the 36th, so 36/40 of the time; within four standard deviations
    assert abs(kept / 2000 - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 2000)


def test_a_moment_falls_into_a_long_step_more_often_than_into_a_short_one() -> None:
    """One step in a hundred takes as long as all the others: half of all moments fall into one of them."""
    times = [1.0] * 990 + [100.0] * 10
    assert known(upper_bound(times, 0.98)).seconds == 1.0
    bound = known(step_bound(times, 0.98))
    generator, runs_over = random.Random(3), 0
    for _ in range(4000):
        left_s = generator.uniform(500.0, 5000.0)
        while left_s >= bound.seconds:
            left_s -= generator.choice(times)
        runs_over += left_s < 0.0
    assert runs_over / 4000 < 0.02 + 4 * math.sqrt(0.02 / 4000)
    assert "more likely to fall into a long one" in bound.because


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_time_that_is_none_is_refused(wrong: float, place: int) -> None:
    times = [1.0, 2.0]
    times.insert(place, wrong)
    for of in (upper_bound, step_bound):
        with pytest.raises(ValueError, match="negative, infinite or NaN"):
            of(times)
