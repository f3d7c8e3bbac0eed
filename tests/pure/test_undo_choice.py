"""Whether weights are copied before each step: by what copies and steps have taken, and by the memory that is free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.model.undo_choice import (
    CHEAP_PART,
    CHEAP_S,
    MEASURED_STEPS,
    MEMORY_PART,
    WARM_UP_STEPS,
    Trial,
    Undo,
    choose,
    why_too_large,
)

STEPS = WARM_UP_STEPS + MEASURED_STEPS


@given(copy_s=st.floats(1e-6, 10), step_s=st.floats(1e-6, 100))
def test_cheap_is_a_part_of_the_step_or_next_to_nothing(copy_s: float, step_s: float) -> None:
    choice = choose([copy_s] * STEPS, [step_s] * STEPS)
    assert (choice.undo is Undo.COPIES) == (copy_s <= CHEAP_S or copy_s <= CHEAP_PART * step_s)
    assert choice.undo.copies == (choice.undo is Undo.COPIES)
    assert bool(choice.why) == (choice.undo is Undo.RULE)


def test_the_first_steps_and_single_slow_ones_do_not_count() -> None:
    slow = [60.0] * WARM_UP_STEPS + [0.001] * (MEASURED_STEPS - 1) + [60.0]
    assert choose(slow, [0.1] * STEPS).undo is Undo.COPIES
    assert choose(slow[:-1], [0.1] * (STEPS - 1)).undo is Undo.TRIAL


@given(needed_bytes=st.integers(0, 2**40), free_bytes=st.integers(0, 2**42))
def test_a_copy_takes_a_part_of_the_free_memory_at_most(needed_bytes: int, free_bytes: int) -> None:
    assert (why_too_large(needed_bytes, free_bytes) is None) == (needed_bytes <= MEMORY_PART * free_bytes)


def test_a_trial_measures_copies_and_steps_apart() -> None:
    now_s = 0.0
    trial = Trial(lambda: now_s, lambda: 1000)
    for step in range(STEPS):
        trial.copy_begins()
        now_s += 0.010
        trial.copy_ends()
        now_s += 0.100
        choice = trial.step_ends()
        assert choice.undo is (Undo.TRIAL if step < STEPS - 1 else Undo.RULE)
    assert choice.why == "a copy takes 10 ms, and a step 100 ms"


def test_memory_is_looked_at_where_more_is_needed_than_before() -> None:
    asked: list[int] = []

    def free_bytes() -> int:
        asked.append(1)
        return 1000

    trial = Trial(lambda: 0.0, free_bytes)
    assert trial.why_no_room(200) is None
    assert trial.why_no_room(200) is None
    assert len(asked) == 1
    assert trial.why_no_room(400) is None, "of the 200 that are new a quarter is free"
    assert trial.why_no_room(700) == "a copy takes 300 B, and 1000 B of memory are free"
