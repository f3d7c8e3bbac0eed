"""What `make test` says of itself: how long it still takes, and what it has cost."""

from __future__ import annotations

import doctest

import pytest

from tests import daily, few_examples, progress
from tests.daily import verdict
from tests.progress import MEAN_S, expected_s, left_s, line


def test_a_test_takes_what_it_took_last_time_and_else_the_mean_of_its_ring() -> None:
    durations_s = {"tests/pure/test_a.py::test_it": 3.0}
    assert expected_s("tests/pure/test_a.py::test_it", durations_s) == 3.0
    assert expected_s("tests/pure/test_a.py::test_another", durations_s) == MEAN_S["pure"]
    assert expected_s("elsewhere.py::test_it", durations_s) > 0


def test_what_is_left_is_shared_by_the_workers() -> None:
    assert left_s([1.0] * 60, 4, 100.0, 100.0) == 15.0
    assert left_s([], 4, 100.0, 100.0) == 0.0


def test_the_longest_test_is_run_by_one_worker() -> None:
    assert left_s([1.0] * 10 + [50.0], 4, 100.0, 100.0) == 50.0


@pytest.mark.parametrize(("expected", "took", "pace"), [(100.0, 150.0, 1.5), (100.0, 50.0, 0.5), (1.0, 9.0, 1.0)])
def test_the_rest_is_as_slow_as_what_has_ended_once_that_says_something(
    expected: float, took: float, pace: float
) -> None:
    assert left_s([4.0, 4.0], 2, expected, took) == pytest.approx(4.0 * pace)


def test_the_line_says_the_share_of_the_time() -> None:
    assert line(1_200, 4_000, 60.0, 180.0) == " 25%  1,200 of 4,000 tests, 1:00 so far, about 3:00 left"
    assert line(4_000, 4_000, 240.0, 0.0) == "100%  4,000 of 4,000 tests, 4:00 so far, about 0:00 left"


def test_a_run_fails_if_any_part_of_it_does() -> None:
    assert verdict({"lint": 0, "tests": 0}, 100.0, 60.0, None)[0] == 0
    for code in (1, 2, -9):
        status, said = verdict({"lint": code, "tests": 0}, 100.0, 60.0, None)
        assert status == 1
        assert f"failed: lint (exit status {code})" in said


def test_a_run_that_is_too_dear_fails() -> None:
    assert verdict({"tests": 0}, 600.0, 60.0, 600.0)[0] == 0
    status, said = verdict({"tests": 0}, 600.1, 60.0, 600.0)
    assert status == 1
    assert "600 CPU seconds" in said[-1]


def test_the_examples_are_true() -> None:
    for module in (daily, few_examples, progress):
        done = doctest.testmod(module)
        assert done.attempted
        assert not done.failed, module.__name__
