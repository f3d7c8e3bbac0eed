"""The train loop where a group has changed: what it asks of the coordinator, in which order, and what it raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import torchelastic
from tests.pure.test_train_loop import Counter, ScriptedCoordinator, count_to
from torchelastic.errors import UnfitError
from torchelastic.group.step_course import StepCourse
from torchelastic.join_rules import Dismissal, GroupChange
from torchelastic.train_loop import train

JOINED, SMALLER = GroupChange((1,), 1, 2), GroupChange((), 2, 1)


class Changing(ScriptedCoordinator):
    """Its groups differ from the last one that has trained as the test says, until a step has succeeded in each."""

    def __init__(self, *changes: GroupChange | None, dismissed: Dismissal | None = None) -> None:
        super().__init__()
        self.changes, self.dismissed = list(changes), dismissed
        self.change: GroupChange | None = None

    def init_process_group(self) -> None:
        super().init_process_group()
        self.change = self.changes.pop(0) if self.changes else None

    def step_committed(self) -> None:
        super().step_committed()
        self.change = None

    def group_change(self, *, in_sync: bool) -> GroupChange | None:
        return self.change

    def go_on_without(self, change: GroupChange, error: str) -> None:
        self._note(f"go_on_without {change.newcomers} {error}")

    def dismissal(self, *, may_wait: bool) -> Dismissal | None:
        return self.dismissed

    def wait_for_as_many(self, change: GroupChange) -> None:
        self._note(f"wait_for_as_many {change.former_size}")

    def fails_for_good(self) -> None:
        self._note("fails_for_good")

    def asked(self) -> list[str]:
        return [call for call in self.calls if call.startswith(("go_on", "wait_for", "on_error", "fails"))]


def always(at: int, error: Callable[[], Exception]) -> Callable[[Counter], None]:
    """A train step that raises an error at one step whenever it comes to it."""

    def step(state: Counter) -> None:
        state.count += 1
        if state.count == at:
            raise error()

    return step


@pytest.mark.parametrize("kind", [ValueError, AttributeError, AssertionError, NotImplementedError, TypeError])
def test_an_error_in_the_first_step_with_a_newcomer_is_undone_and_the_newcomer_notified_before_the_group_is_cut(
    kind: type[Exception],
) -> None:
    coordinator, state = Changing(JOINED, None), Counter()
    train(coordinator, count_to(3, {1: kind("mine")}), state)
    assert (state.count, state.applied) == (3, [0])
    assert coordinator.asked() == [f"go_on_without (1,) {kind.__name__}: mine", "on_error"]


def test_the_same_of_a_sync() -> None:
    coordinator, state = Changing(JOINED, None), Counter()
    state.fail_sync = [TypeError("cannot be sent")]
    train(coordinator, count_to(3), state)
    assert (state.count, state.syncs, state.applied) == (3, 2, [0])
    assert coordinator.asked() == ["go_on_without (1,) TypeError: cannot be sent", "on_error"]


def test_the_second_step_with_a_newcomer_is_as_any_other() -> None:
    with pytest.raises(ValueError, match="mine"):
        train(Changing(JOINED), count_to(5, {2: ValueError("mine")}), Counter())


def test_a_runtime_error_is_tried_as_often_as_in_any_group_before_it_is_laid_to_the_newcomer() -> None:
    coordinator, tries = Changing(JOINED, JOINED, JOINED, None, None, None), 0

    def step(state: Counter) -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(coordinator, step, Counter())
    assert tries == 6, "three times with it, three times without"
    assert coordinator.asked() == [
        *["on_error"] * 2, "go_on_without (1,) RuntimeError: shapes do not fit", *["on_error"] * 4, "fails_for_good",
    ]  # fmt: skip


def test_too_many_failures_in_a_row_with_a_newcomer_end_it_and_not_the_run() -> None:
    coordinator, state = Changing(JOINED, JOINED, None), Counter()
    first, second = (count_to(3, {1: RuntimeError("Connection closed by peer")}) for _ in range(2))

    def step(state: Counter) -> None:
        (first if coordinator.calls.count("init_process_group") == 1 else second)(state)

    train(coordinator, step, state, max_failures=2)
    assert state.count == 3
    assert coordinator.asked() == ["on_error", "go_on_without (1,) RuntimeError: Connection closed by peer", "on_error"]


def test_an_error_in_a_smaller_group_waits_for_as_many_as_there_were() -> None:
    coordinator, state = Changing(SMALLER, None), Counter()
    train(coordinator, count_to(3, {1: ValueError("mine")}), state)
    assert (state.count, state.applied) == (3, [0])
    assert coordinator.asked() == ["on_error", "wait_for_as_many 2"]


@pytest.mark.parametrize("changes", [(JOINED, SMALLER), (SMALLER, JOINED)])
def test_an_error_that_comes_in_both_is_raised(changes: tuple[GroupChange, GroupChange]) -> None:
    with pytest.raises(ValueError, match="mine"):
        train(Changing(*changes), always(1, lambda: ValueError("mine")), Counter())


def test_another_error_in_the_other_group_is_not_the_same() -> None:
    coordinator, errors = Changing(JOINED, SMALLER, None), [ValueError("with it"), ValueError("alone")]

    def step(state: Counter) -> None:
        if errors:
            raise errors.pop(0)
        raise StopIteration

    train(coordinator, step, Counter())
    assert not errors
    assert coordinator.asked() == [
        "go_on_without (1,) ValueError: with it", "on_error", "on_error", "wait_for_as_many 2",
    ]  # fmt: skip


def test_what_cannot_be_undone_is_raised() -> None:
    class Unsaved(Counter):
        def snapshot(self) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ValueError, match="mine"):
        train(Changing(JOINED), always(1, lambda: ValueError("mine")), Unsaved())


def test_what_the_rendezvous_has_found_out_is_nobodys_fault() -> None:
    class TimedOut(Changing):
        def init_process_group(self) -> None:
            super().init_process_group()
            if self.change is not None:
                raises_as_ours(torchelastic.NonRetryableException("no group within the time-out"))

    coordinator = TimedOut(JOINED)
    with pytest.raises(torchelastic.NonRetryableException, match="time-out"):
        train(coordinator, count_to(3), Counter())
    assert coordinator.asked() == ["on_error"]


def raises_as_ours(error: Exception) -> None:
    """Raise it in a module of the package: of which line an error comes says whose it is."""
    module: dict[str, object] = {"__name__": "torchelastic.p2p.somewhere", "error": error}
    exec("def fail():\n    raise error\nfail()", module)


@pytest.mark.parametrize("is_for_good", [True, False])
def test_a_newcomer_that_the_others_go_on_without_ends_with_its_own_error(is_for_good: bool) -> None:
    coordinator = Changing(dismissed=Dismissal("ValueError: theirs", is_for_good))
    with pytest.raises(ValueError, match=r"^mine$"):
        train(coordinator, count_to(3, {1: ValueError("mine")}), Counter())
    assert ("fails_for_good" in coordinator.calls) is is_for_good


def test_what_is_found_unfit_at_the_end_of_a_step_ends_this_worker_and_it_is_not_started_again() -> None:
    def check_end() -> None:
        raise UnfitError("the step trains what nobody keeps")

    coordinator, state = Changing(), Counter()
    state.step_course = StepCourse(lambda: 0, lambda: 0, lambda: (), check_end)
    with pytest.raises(UnfitError, match="the step trains what nobody keeps"):
        train(coordinator, count_to(3), state)
    assert coordinator.asked() == ["on_error", "fails_for_good"]


def test_a_newcomer_without_an_error_of_its_own_ends_with_theirs() -> None:
    coordinator, state = Changing(dismissed=Dismissal("ValueError: theirs", True)), Counter()
    with pytest.raises(torchelastic.NonRetryableException, match=r"go on without this worker.*ValueError: theirs"):
        train(coordinator, count_to(3, {1: RuntimeError("Connection closed by peer")}), state)
    assert coordinator.calls.count("fails_for_good") == 1
