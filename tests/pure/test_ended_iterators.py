"""An iterator that an error has ended ends no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torchelastic
from tests.pure.test_train_loop import Counter, ScriptedCoordinator
from torchelastic.ended_iterators import ended_by, is_of_iterator
from torchelastic.train_loop import train


def failing(at: int, last: int = 6) -> Iterator[int]:
    for number in range(1, last):
        if number == at:
            raise RuntimeError("hiccup")
        yield number


def counts(draw: Callable[[], int]) -> Callable[[Counter], None]:
    def step(state: Counter) -> None:
        draw()
        state.count += 1

    return step


def test_a_generator_that_has_raised_does_not_end_the_run_as_if_its_data_were_over() -> None:
    numbers, coordinator, state = failing(at=3), ScriptedCoordinator(), Counter()
    with pytest.raises(
        torchelastic.NonRetryableException, match=r"the generator failing \(.*test_ended_iterators.py, line \d+\) was"
    ):
        train(coordinator, counts(lambda: next(numbers)), state)
    assert state.count == 2
    assert "signal_training_done" not in coordinator.calls


def test_data_that_are_over_end_the_run_also_after_a_failure_at_an_earlier_step() -> None:
    made: list[Iterator[int]] = [failing(at=3)]

    def draw() -> int:
        try:
            return next(made[-1])
        except RuntimeError:
            made.append(failing(at=0))
            raise

    state = Counter()
    train(ScriptedCoordinator(), counts(draw), state)
    assert state.count == 7, "two of the first, five of the second"


def test_a_script_may_say_itself_that_it_ends_in_a_step_that_is_repeated() -> None:
    numbers, state, tries = failing(at=3), Counter(), 0

    def step(state: Counter) -> None:
        nonlocal tries
        tries += 1
        if tries > 3:
            raise StopIteration
        next(numbers)
        state.count += 1

    train(ScriptedCoordinator(), step, state)
    assert (state.count, tries) == (2, 4)


def test_an_error_beside_any_iterator_has_ended_none() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("of the step")
    assert ended_by(caught.value) == ""
    assert is_of_iterator(StopIteration())


def test_iterators_of_a_data_loader_raise_it_themselves() -> None:
    module: dict[str, Any] = {"__name__": "torch.utils.data.dataloader"}
    exec("def over(error):\n    raise error", module)
    for error in (RuntimeError("a worker has died"), StopIteration()):
        with pytest.raises(type(error)) as caught:
            module["over"](error)
        if isinstance(caught.value, StopIteration):
            assert is_of_iterator(caught.value)
        else:
            assert ended_by(caught.value) == "the iterator of a DataLoader"
