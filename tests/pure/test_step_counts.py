from __future__ import annotations

import pytest

from torchelastic.model.step_counts import UNKNOWN_STEPS, StepCounts, expected_steps


@pytest.mark.parametrize(
    ("begun", "done", "usual", "are_complete"),
    [
        ((1,), (1,), (1,), True),
        ((1,), (0,), (1,), False),
        ((1, 1), (1, 1), (1, 2), False),
        ((1, 0), (1, 0), (1, 1), False),
        ((1, 2), (1, 2), (1, 2), True),
    ],
)
def test_a_train_step_is_complete_when_all_have_stepped_as_often_as_they_do(
    begun: tuple[int, ...], done: tuple[int, ...], usual: tuple[int, ...], are_complete: bool
) -> None:
    assert StepCounts(begun, done, usual).are_complete is are_complete


@pytest.mark.parametrize(
    ("begun", "number", "more"), [((0, 0), 0, True), ((1, 0), 1, True), ((1, 1), 1, False), ((0, 2), 0, False)]
)
def test_others_follow_until_each_has_begun_as_often_as_it_does(
    begun: tuple[int, ...], number: int, more: bool
) -> None:
    assert StepCounts(begun, begun, (1, 2)).more_to_come(number) is more


def test_one_that_has_stepped_more_often_than_before_may_always_have_more_to_do() -> None:
    assert [expected_steps(0, 3), expected_steps(3, 2), expected_steps(3, 3)] == [3, 3, 3]
    assert expected_steps(3, 5) == expected_steps(UNKNOWN_STEPS, 1) == UNKNOWN_STEPS
    assert StepCounts((9,), (9,), (UNKNOWN_STEPS,)).more_to_come(0)
