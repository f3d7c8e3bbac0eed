from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from torchelastic.lifetime import Deadline, nearest, time_limit_s
from torchelastic.lifetime.deadline import MLP_VARIABLE, SAGEMAKER_VARIABLE, automatic_deadlines

NOW_S, WALL_S = 500.0, 1_800_000_000.0


def found(**variables: str) -> list[Deadline]:
    return automatic_deadlines(variables, clock=lambda: NOW_S, wall_clock=lambda: WALL_S)


@dataclass
class Notice:
    """A source of one's own: it may come, move and go."""

    left_s: float | None = None
    name: str = "notice"
    reason: str = "somebody called"

    def remaining_s(self, now_s: float) -> float | None:
        return self.left_s


@pytest.mark.parametrize("text", ["1800000120", "1800000120.0", " 1.80000012e9 "])
def test_a_date_becomes_monotonic_time_when_it_is_read(text: str) -> None:
    (deadline,) = found(**{MLP_VARIABLE: text})
    assert deadline.remaining_s(NOW_S) == 120.0
    assert deadline.remaining_s(NOW_S + 150.0) == -30.0
    assert (deadline.name, deadline.reason) == ("capacity block", f"{MLP_VARIABLE}={text}")


def test_sagemaker_begins_to_terminate_half_an_hour_before() -> None:
    (deadline,) = found(**{SAGEMAKER_VARIABLE: "1800003600"})
    assert deadline.remaining_s(NOW_S) == 1800.0
    assert deadline.reason == f"{SAGEMAKER_VARIABLE}=1800003600, less 1800 s"


def test_if_that_is_over_the_end_itself_counts(caplog: pytest.LogCaptureFixture) -> None:
    (deadline,) = found(**{SAGEMAKER_VARIABLE: "1800000120"})
    assert deadline.remaining_s(NOW_S) == 120.0
    assert "counting on the end itself" in caplog.text


@pytest.mark.parametrize("variable", [MLP_VARIABLE, SAGEMAKER_VARIABLE])
def test_a_date_in_the_past_is_a_warning_and_no_deadline(variable: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert found(**{variable: "1799999990"}) == []
    assert f"{variable}=1799999990 is 10 s in the past: ignored" in caplog.text


@pytest.mark.parametrize("variable", [MLP_VARIABLE, SAGEMAKER_VARIABLE])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tomorrow", "no number"),
        ("2026-11-21T20:00:00", "no number"),
        ("nan", "no date"),
        ("inf", "no date"),
        ("-5", "no date"),
        ("1800000120000", "looks like milliseconds"),
    ],
)
def test_garbage_is_one_error_that_names_the_variable_and_the_remedy(variable: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        found(**{variable: text})
    assert variable in str(caught.value)
    assert "set it to Unix seconds" in str(caught.value)


def test_the_nearest_counts_whichever_it_is_at_the_time() -> None:
    notice = Notice()
    limit = time_limit_s(100.0, began_s=NOW_S)
    both = nearest([None, limit, nearest([notice])])
    assert (both.remaining_s(NOW_S), both.which(NOW_S)) == (100.0, limit)
    notice.left_s = 30.0
    assert (both.remaining_s(NOW_S), both.which(NOW_S)) == (30.0, notice)
    assert both.which(NOW_S + 90.0) is limit
    notice.left_s = None
    assert both.remaining_s(NOW_S) == 100.0
    assert both.name == "time limit, notice"


def test_what_is_no_deadline_is_refused() -> None:
    with pytest.raises(TypeError, match=r"12\.0 is no deadline"):
        nearest([12.0])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_is_a_time(wrong: float) -> None:
    with pytest.raises(ValueError, match="time_limit_s is"):
        time_limit_s(wrong, began_s=0.0)
