from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.lifetime.iteration_times import WINDOW, IterationTimes


def of(*seconds: float, warm_up: int = 0) -> IterationTimes:
    times = IterationTimes(warm_up)
    for one in seconds:
        times.observe(one)
    return times


def bound_s(times: IterationTimes, iterations: int = 1, confidence: float = 0.9) -> float:
    view = times.view()
    assert view is not None
    bound = view.bound(iterations, confidence)
    assert bound is not None
    return bound.seconds


def test_at_first_nothing_is_known() -> None:
    times = IterationTimes()
    assert (times.usual_s, times.longest_s, times.average_s(), times.view()) == (0.0, 0.0, 0.0, None)
    assert times.expected_s(10) == 0.0


def test_the_first_iterations_are_set_apart() -> None:
    times = of(60.0, 20.0, 1.0, 1.5, 1.0, warm_up=2)
    assert (times.set_apart, times.recent_s, times.count) == ((60.0, 20.0), (1.0, 1.5, 1.0), 5)
    assert (times.usual_s, times.longest_s) == (1.0, 1.5)


def test_a_slow_iteration_is_forgotten() -> None:
    times = of(*[1.0] * 50, 30.0)
    assert times.longest_s == 30.0
    for _ in range(WINDOW):
        times.observe(1.0)
    assert (times.longest_s, bound_s(times)) == (1.0, 1.0)


def test_a_slow_iteration_moves_neither_what_is_usual_nor_what_is_expected() -> None:
    times = of(*[1.0] * 100, 300.0, *[1.0] * 100)
    assert (times.usual_s, times.average_s()) == (1.0, 1.0)
    assert times.expected_s(1000) == 1000.0


def test_pauses_that_come_at_equal_distances_are_foreseen() -> None:
    times = of(*([1.0] * 49 + [20.0]) * 4)
    view = times.view()
    assert view is not None
    assert view.rhythm is not None
    assert (view.rhythm.every, view.rhythm.due_in) == (50, 50)
    assert bound_s(times) == 1.0, "the next one is no pause"
    with_margin_s = bound_s(times, iterations=50)
    assert 20.0 < with_margin_s < 30.0, "four pauses are too few for a confidence"
    assert times.expected_s(100) == pytest.approx(98 * 1.0 + 2 * 20.0)
    assert times.expected_s(49) == pytest.approx(49.0)
    for _ in range(49):
        times.observe(1.0)
    assert bound_s(times) == with_margin_s, "the next one is a pause"


@pytest.mark.parametrize("then", [[20.0], [1.0] * 60])
def test_a_pause_out_of_turn_or_one_that_does_not_come_ends_the_rhythm(then: list[float]) -> None:
    times = of(*([1.0] * 49 + [20.0]) * 4, *then)
    view = times.view()
    assert view is not None
    assert view.rhythm is None
    assert bound_s(times, confidence=0.99) > 10.0, "now any iteration may be a pause"


def test_pauses_without_a_rhythm_count_as_often_as_they_came() -> None:
    times = of(*[1.0] * 10, 20.0, *[1.0] * 37, 20.0, *[1.0] * 51)
    assert times.expected_s(50) == pytest.approx(49 + 20)


def test_a_changed_group_begins_anew() -> None:
    times = of(*[1.0] * 20, warm_up=1)
    times.reset()
    times.observe(40.0)
    times.observe(2.0)
    assert (times.set_apart, times.recent_s, times.count) == ((40.0,), (2.0,), 22)


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=80), st.integers(0, 500))
def test_whatever_comes_the_numbers_make_sense(durations: list[float], ahead: int) -> None:
    times = of(*durations)
    assert min(durations) <= times.average_s() * (1 + 1e-9)
    assert times.average_s() <= max(durations) * (1 + 1e-9)
    assert 0.0 <= times.expected_s(ahead) <= (ahead + 1) * max(durations) * (1 + 1e-6)
    view = times.view()
    assert view is not None
    assert len(view.ordinary_s) + len(view.pauses_s) == len(durations)


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="seconds is"):
        IterationTimes().observe(wrong)


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan])
def test_iterations_of_an_earlier_life_that_make_no_sense_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="an iteration of an earlier attempt"):
        IterationTimes().remember([1.0, wrong])
