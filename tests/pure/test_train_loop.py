"""The train loop against a coordinator that obeys the test: the order of calls, and what each failure costs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchelastic
from torchelastic import metrics, train_loop
from torchelastic.checkpoint import Checkpoint, CheckpointManager
from torchelastic.coordinator import Coordinator
from torchelastic.loop_observer import LoopObserver, notify_all
from torchelastic.state import check_train_step
from torchelastic.step import Step
from torchelastic.train_loop import TrainLoop, train


class ScriptedCoordinator(Coordinator):
    """A world of one that does what it is told, and notes every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: list[BaseException] = []
        self.stopped = False
        self.leave_after: set[int] = set()
        self.fail: dict[str, list[Exception]] = {}
        self.steps = 0

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    def rendezvous_barrier(self) -> Any:
        self._note("rendezvous_barrier")
        return None, 0, 1

    def init_process_group(self) -> None:
        self._note("init_process_group")

    def should_save_checkpoint(self) -> bool:
        self._note("should_save_checkpoint")
        return False

    def should_rendezvous(self, state: torchelastic.State) -> bool:
        self._note("should_rendezvous")
        return self.steps in self.leave_after

    def should_stop_training(self) -> bool:
        return self.stopped

    def signal_training_done(self) -> None:
        self._note("signal_training_done")
        self.stopped = True

    def monitor_progress(self, state: torchelastic.State, worker_stats: Any) -> None:
        self._note("monitor_progress")

    def report_progress(self, state: torchelastic.State) -> None:
        self._note("report_progress")

    def on_error(self, e: BaseException) -> None:
        self.errors.append(e)
        self._note("on_error")

    def loop_was_left(self) -> None:
        self._note("loop_was_left")

    def step_committed(self) -> None:
        self.steps += 1


class Counter(torchelastic.State):
    """Counts steps; its snapshot is the count."""

    def __init__(self) -> None:
        self.count = 0
        self.syncs = 0
        self.applied: list[int] = []
        self.fail_sync: list[Exception] = []

    def sync(self) -> None:
        self.syncs += 1
        if self.fail_sync:
            raise self.fail_sync.pop(0)

    def snapshot(self) -> int:
        return self.count

    def apply(self, snapshot: int) -> None:
        self.applied.append(snapshot)
        self.count = snapshot


def count_to(limit: int, at: dict[int, Exception] | None = None) -> Callable[[Counter], None]:
    """A train step that counts, raises each of `at` once after having counted, and ends at `limit`."""
    faults = dict(at or {})

    def step(state: Counter) -> None:
        if state.count == limit:
            raise StopIteration
        state.count += 1
        if state.count in faults:
            raise faults.pop(state.count)

    return step


def test_the_order_of_calls_is_that_of_0_1() -> None:
    coordinator = ScriptedCoordinator()
    state = train(coordinator, count_to(1), Counter())
    assert isinstance(state, Counter)
    assert state.count == 1
    assert coordinator.calls == [
        "rendezvous_barrier",
        "init_process_group",
        "monitor_progress",
        "should_rendezvous",
        "report_progress",
        "signal_training_done",
    ]


def test_a_step_that_raises_a_runtime_error_is_rolled_back_and_repeated() -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    train(coordinator, count_to(5, {3: RuntimeError("lost")}), state)
    assert (state.count, state.applied, state.syncs) == (5, [2], 2)
    assert coordinator.steps == 5


@pytest.mark.parametrize("kind", [ValueError, KeyError, NotImplementedError, RecursionError])
def test_an_exception_of_the_user_keeps_its_type_and_is_not_retried(kind: type[Exception]) -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    with pytest.raises(kind):
        train(coordinator, count_to(5, {3: kind("mine")}), state)
    assert state.applied == []
    assert isinstance(coordinator.errors[0], kind)
    assert coordinator.calls[-1] == "loop_was_left", "nobody waits for what the script does now"


def test_retryable_is_a_runtime_error_and_non_retryable_is_not() -> None:
    state = Counter()
    train(ScriptedCoordinator(), count_to(4, {2: torchelastic.RetryableException()}), state)
    assert state.applied == [1]
    with pytest.raises(torchelastic.NonRetryableException):
        train(ScriptedCoordinator(), count_to(4, {2: torchelastic.NonRetryableException()}), Counter())


def test_failures_in_a_row_are_bounded_and_the_last_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_loop, "MAX_FAILURES", 4)
    tries = 0

    def step(state: Counter) -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("try " + "again " * tries)

    with pytest.raises(RuntimeError, match="4 failures in a row") as caught:
        train(ScriptedCoordinator(), step, Counter())
    assert str(caught.value.__cause__) == "try again again again again "
    assert tries == 4


def test_the_same_error_at_one_step_is_raised_as_it_is_at_the_third_attempt() -> None:
    class Hears(ScriptedCoordinator):
        def fails_for_good(self) -> None:
            self._note("fails_for_good")

    coordinator, state, tries = Hears(), Counter(), 0

    def step(state: Counter) -> None:
        nonlocal tries
        tries += state.count == 2
        state.count += 1
        if state.count == 3:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match=r"^shapes do not fit$") as caught:
        train(coordinator, step, state)
    assert caught.value.__cause__ is caught.value.__context__ is None, "one traceback"
    assert (tries, coordinator.calls.count("fails_for_good")) == (3, 1)


def test_an_error_of_a_commit_that_is_not_tried_again_is_said_to_be_one() -> None:
    class Hears(ScriptedCoordinator):
        def fails_for_good(self) -> None:
            self._note("fails_for_good")

    class Strict(Counter):
        def commit(self) -> None:
            raise torchelastic.NonRetryableException("drawn on another thread")

    coordinator = Hears()
    with pytest.raises(torchelastic.NonRetryableException, match="another thread"):
        train(coordinator, count_to(3), Strict())
    assert [call for call in coordinator.calls if call in ("on_error", "fails_for_good")] == [
        "on_error",
        "fails_for_good",
    ]


def test_the_same_error_of_a_sync_is_raised_at_the_third_attempt() -> None:
    class Broken(Counter):
        def sync(self) -> None:
            super().sync()
            raise RuntimeError("sizes do not fit")

    state = Broken()
    with pytest.raises(RuntimeError, match=r"^sizes do not fit$"):
        train(ScriptedCoordinator(), count_to(1), state)
    assert state.syncs == 3


def test_an_error_of_the_accelerator_is_left_to_a_new_process() -> None:
    class Hears(ScriptedCoordinator):
        def fails_for_good(self) -> None:
            self._note("fails_for_good")

    def step(state: Counter) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    coordinator = Hears()
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        train(coordinator, step, Counter())
    assert coordinator.calls.count("rendezvous_barrier") == 3
    assert "fails_for_good" not in coordinator.calls


def test_a_committed_step_sets_the_count_of_failures_back() -> None:
    faults: dict[int, Exception] = {number: RuntimeError() for number in range(1, 30)}
    state = Counter()
    train(ScriptedCoordinator(), count_to(30, faults), state, max_failures=2)
    assert state.count == 30


def test_an_argument_goes_before_the_module_bound() -> None:
    def step(state: Counter) -> None:
        raise RuntimeError("always")

    with pytest.raises(RuntimeError, match="1 failures in a row"):
        train(ScriptedCoordinator(), step, Counter(), max_failures=1)


def test_a_formation_that_fails_applies_nothing() -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    coordinator.fail["init_process_group"] = [RuntimeError("a peer did not come")]
    train(coordinator, count_to(3), state)
    assert (state.count, state.applied) == (3, [])
    assert coordinator.calls.count("rendezvous_barrier") == 2


def test_a_sync_that_fails_is_undone_and_tried_in_the_next_group() -> None:
    state = Counter()
    state.fail_sync = [RuntimeError("the source died")]
    train(ScriptedCoordinator(), count_to(3), state)
    assert (state.count, state.applied, state.syncs) == (3, [0], 2)


@pytest.mark.parametrize("where", ["monitor_progress", "should_rendezvous", "report_progress"])
def test_what_fails_after_the_commit_costs_a_group_and_never_the_step(where: str) -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    coordinator.fail[where] = [RuntimeError("a peer died")]
    train(coordinator, count_to(3), state)
    assert (state.count, state.applied, coordinator.steps) == (3, [], 3)
    assert coordinator.calls.count("rendezvous_barrier") == 2


def test_leaving_the_group_undoes_nothing() -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    coordinator.leave_after = {2}
    train(coordinator, count_to(4), state)
    assert (state.count, state.applied, state.syncs) == (4, [], 2)


def test_a_closed_run_returns_the_state() -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    coordinator.fail["rendezvous_barrier"] = [torchelastic.StopException("closed")]
    assert train(coordinator, count_to(3), state) is state
    assert state.count == 0


def test_non_retryable_from_the_barrier_ends_the_run() -> None:
    coordinator = ScriptedCoordinator()
    coordinator.fail["rendezvous_barrier"] = [torchelastic.NonRetryableException("no group in time")]
    with pytest.raises(torchelastic.NonRetryableException, match="no group in time"):
        train(coordinator, count_to(3), Counter())
    assert coordinator.calls == ["rendezvous_barrier", "on_error", "loop_was_left"]


def test_what_a_step_may_return() -> None:
    stats = torchelastic.SimpleWorkerStats(3.0)
    train(ScriptedCoordinator(), _returning(lambda _state: None), Counter())
    train(ScriptedCoordinator(), _returning(lambda _state: stats), Counter())
    replaced = Counter()
    final = train(ScriptedCoordinator(), _returning(lambda _state: (replaced, stats)), Counter())
    assert final is replaced


def _returning(value_of: Callable[[Counter], Any]) -> Callable[[Counter], Any]:
    calls = 0

    def step(state: Counter) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise StopIteration
        return value_of(state)

    return step


@pytest.mark.parametrize("value", [3, "loss", (1, 2), [None]])
def test_anything_else_that_a_step_returns_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="return None, a WorkerStats, or"):
        train(ScriptedCoordinator(), _returning(lambda _state: value), Counter())


def test_something_that_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torchelastic\.State"):
        train(ScriptedCoordinator(), count_to(1), object())  # type: ignore[arg-type]  # what the test is about


@pytest.mark.parametrize("copies", [False, True])
def test_a_snapshot_that_is_no_copy_is_said_after_the_first_step(
    copies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(2)

    class Mine(Counter):
        def snapshot(self) -> Any:
            return {"step": self.count, "module": [weight.clone() if copies else weight.detach()]}

        def apply(self, snapshot: Any) -> None:
            weight.copy_(snapshot["module"][0])

    def step(state: Counter) -> None:
        if weight[0] == 2.0:
            raise StopIteration
        weight.add_(1.0)

    train(ScriptedCoordinator(), step, Mine())
    assert caplog.text.count("Mine.snapshot() returns tensors that the step changes") == (not copies)


def test_a_snapshot_without_apply_is_refused_before_anything_is_trained() -> None:
    class Forgetful(torchelastic.State):
        def sync(self) -> None: ...

        def snapshot(self) -> int:
            return 1

    coordinator = ScriptedCoordinator()
    with pytest.raises(torchelastic.NonRetryableException, match="apply"):
        train(coordinator, count_to(1), Forgetful())
    assert coordinator.calls == ["loop_was_left"]


@pytest.mark.parametrize(
    ("name", "hook", "complaint"),
    [
        ("sync", lambda self, group: None, r"sync\(self\), or as sync\(self, world_size, rank\)"),
        ("snapshot", lambda self, step: 1, r"snapshot\(self\)"),
        ("apply", lambda self: None, r"apply\(self, snapshot\)"),
        ("commit", lambda self, step: None, r"commit\(self\)"),
        ("save", lambda self: None, r"save\(self, stream\)"),
        ("load", lambda self, stream, extra: None, r"load\(self, stream\)"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_before_anything_is_trained(
    name: str, hook: Callable[..., Any], complaint: str
) -> None:
    coordinator, state = ScriptedCoordinator(), type("Mine", (Counter,), {name: hook})()
    with pytest.raises(TypeError, match=rf"Mine\..*must be written as {complaint}"):
        train(coordinator, count_to(1), state, checkpoint=MemoryManager())
    assert coordinator.calls == []


def test_hooks_for_checkpoints_are_only_looked_at_where_there_is_a_manager() -> None:
    state = type("Mine", (Counter,), {"save": lambda self: None})()
    train(ScriptedCoordinator(), count_to(2), state)
    assert state.count == 2


def test_a_train_step_that_cannot_be_called_is_refused_before_anything_is_trained() -> None:
    def step(state: Counter, batch: int) -> None: ...

    coordinator = ScriptedCoordinator()
    with pytest.raises(TypeError, match=r"step\(state: .*, batch: .*\).* must be written as step\(state\)"):
        train(coordinator, step, Counter())  # type: ignore[arg-type]  # what the test is about
    assert coordinator.calls == []


def test_a_called_train_step_and_a_coordinator_that_was_not_made_are_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"train_step is a NoneType: call .*state\), with the function itself and not what"
    ):
        train(ScriptedCoordinator(), None, Counter())  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(TypeError, match="coordinator is the class ScriptedCoordinator: make one"):
        train(ScriptedCoordinator, count_to(2), Counter())  # type: ignore[arg-type]  # as above


def test_what_a_decorator_adds_or_nothing_is_known_of_can_be_called() -> None:
    def with_batch(step: Callable[[Counter, int], None]) -> Callable[..., None]:
        @functools.wraps(step)
        def wrapped(*arguments: Any) -> None:
            step(arguments[0], 1)

        return wrapped

    @with_batch
    def step(state: Counter, batch: int) -> None:
        state.count += batch
        if state.count == 2:
            raise StopIteration

    train(ScriptedCoordinator(), step, Counter())
    check_train_step(dict.fromkeys)  # C code without a signature


class OldState(torchelastic.State):
    """As written for 0.1.0rc1."""

    def __init__(self) -> None:
        self.count = 0
        self.synced_with: list[tuple[int, int]] = []

    def sync(self, world_size: int, rank: int) -> OldState:
        self.synced_with.append((world_size, rank))
        return self

    def capture_snapshot(self) -> int:
        return self.count

    def apply_snapshot(self, capture_snapshot: int) -> None:
        self.count = capture_snapshot


def test_a_state_written_for_0_1_runs_unchanged() -> None:
    state = OldState()

    faults: dict[int, Exception] = {2: RuntimeError("once")}
    pending = count_to(4, faults)

    def step_with_memory(state: OldState) -> tuple[OldState, None]:
        pending(state)  # type: ignore[arg-type]  # it counts like the other one
        return state, None

    train(ScriptedCoordinator(), step_with_memory, state)
    assert (state.count, state.synced_with) == (4, [(1, 0), (1, 0)])


class MemoryCheckpoint(Checkpoint):
    def __init__(self, manager: MemoryManager) -> None:
        import io

        self.manager = manager
        self.stream = io.BytesIO()

    def open_output_stream(self, key: str) -> Any:
        return self.stream

    def open_input_stream(self, key: str) -> Any:
        self.stream.seek(0)
        return self.stream

    def commit(self) -> None:
        if self.manager.fail:
            raise self.manager.fail.pop(0)
        self.manager.saved.append(self)

    def discard(self) -> None: ...


class MemoryManager(CheckpointManager):
    def __init__(self) -> None:
        self.saved: list[MemoryCheckpoint] = []
        self.fail: list[Exception] = []

    def create_checkpoint(self) -> Checkpoint:
        return MemoryCheckpoint(self)

    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        return self.saved[sequence_id]

    def get_latest_checkpoint(self) -> Checkpoint | None:
        return self.saved[-1] if self.saved else None

    def list_checkpoints(self) -> list[Checkpoint]:
        return list(reversed(self.saved))


class SavedCounter(Counter):
    every = 2

    def should_save_checkpoint(self, rank: int) -> bool:
        return self.count % self.every == 0

    def save(self, stream: Any) -> None:
        stream.close = lambda: None  # a memory file that is closed is gone
        stream.write(str(self.count).encode())

    def load(self, stream: Any) -> None:
        self.count = int(stream.read())


def test_checkpoints_are_saved_when_the_state_says_so_and_loaded_at_the_next_start() -> None:
    manager = MemoryManager()
    train(ScriptedCoordinator(), count_to(5), SavedCounter(), checkpoint=manager)
    assert len(manager.saved) == 2
    seen: list[int] = []

    def step(state: SavedCounter) -> None:
        seen.append(state.count)
        raise StopIteration

    train(ScriptedCoordinator(), step, SavedCounter(), checkpoint=manager)
    assert seen == [4]


def test_a_full_disk_costs_the_checkpoint_and_not_the_step() -> None:
    manager, state = MemoryManager(), SavedCounter()
    manager.fail = [OSError(28, "No space left on device")]
    train(ScriptedCoordinator(), count_to(4), state, checkpoint=manager)
    assert (state.count, state.applied, len(manager.saved)) == (4, [], 1)


def test_a_checkpoint_is_not_loaded_again_after_a_failure() -> None:
    manager, state = MemoryManager(), SavedCounter()
    train(ScriptedCoordinator(), count_to(7, {6: RuntimeError()}), state, checkpoint=manager)
    assert state.count == 7
    assert state.applied == [5], "from the snapshot, not from the checkpoint of step 4"


# --- the user's own loop ----------------------------------------------------------------------------------------------


def test_steps_is_the_same_loop() -> None:
    coordinator, state, faults = ScriptedCoordinator(), Counter(), [3]
    for step in torchelastic.steps(coordinator, state):
        with step:
            if state.count == 5:
                raise StopIteration
            state.count += 1
            if state.count in faults:
                faults.remove(state.count)
                raise RuntimeError("once")
    assert (state.count, state.applied) == (5, [2])
    assert coordinator.calls[-1] == "signal_training_done"


Body = Callable[[Step], bool]


def leave_by_break(steps: Iterator[Step], body: Body) -> None:
    for step in steps:
        if body(step):
            break


def leave_by_return(steps: Iterator[Step], body: Body) -> None:
    for step in steps:
        if body(step):
            return


def leave_by_islice(steps: Iterator[Step], body: Body) -> None:
    for step in itertools.islice(steps, 3):
        body(step)


def leave_by_error(steps: Iterator[Step], body: Body) -> None:
    for step in steps:
        if body(step):
            raise ValueError("mine")


def leave_by_close(steps: Iterator[Step], body: Body) -> None:
    for step in steps:
        if body(step):
            steps.close()  # type: ignore[attr-defined]  # it is a generator


WAYS = [leave_by_break, leave_by_return, leave_by_islice, leave_by_error, leave_by_close]


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("is_kept", [False, True], ids=["anonymous", "kept in a variable"])
def test_a_loop_that_is_left_ends_the_run_for_nobody_else(leave: Callable[..., None], is_kept: bool) -> None:
    coordinator, state = ScriptedCoordinator(), Counter()

    def body(step: Step) -> bool:
        with step:
            state.count += 1
        return state.count == 3

    kept = [torchelastic.steps(coordinator, state)]
    with contextlib.suppress(ValueError):
        leave(kept[0] if is_kept else kept.pop(), body)
    kept.clear()
    assert state.count == 3
    assert "signal_training_done" not in coordinator.calls
    assert coordinator.calls.count("loop_was_left") == 1
    assert coordinator.calls[-1] == "loop_was_left"


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("is_inside", [False, True], ids=["after the block", "inside the block"])
def test_stop_training_ends_the_run_for_everybody_however_the_loop_is_left(
    leave: Callable[..., None], is_inside: bool
) -> None:
    coordinator, state = ScriptedCoordinator(), Counter()

    def body(step: Step) -> bool:
        with step:
            state.count += 1
            if is_inside and state.count == 3:
                step.stop_training()
                assert "signal_training_done" not in coordinator.calls, "the step might still fail"
        if state.count == 3:
            step.stop_training()
            assert coordinator.calls[-4:] == CALLS_OF_A_LAST_STEP, "at once, after what follows each step"
        return state.count == 3

    steps = torchelastic.steps(coordinator, state)
    with contextlib.suppress(ValueError):
        leave(steps, body)
    del steps
    assert state.count == 3
    assert coordinator.calls[-4:] == CALLS_OF_A_LAST_STEP


CALLS_OF_A_LAST_STEP = ["monitor_progress", "should_rendezvous", "report_progress", "signal_training_done"]


def test_a_loop_that_goes_on_after_stop_training_is_over() -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    for step in torchelastic.steps(coordinator, state):
        with step:
            state.count += 1
        if state.count == 3:
            step.stop_training()
    assert state.count == 3
    assert coordinator.calls[-4:] == CALLS_OF_A_LAST_STEP


def test_a_step_that_fails_after_stop_training_is_repeated() -> None:
    coordinator, state, faults = ScriptedCoordinator(), Counter(), [2]
    for step in torchelastic.steps(coordinator, state):
        with step:
            state.count += 1
            if state.count in faults:
                faults.remove(state.count)
                step.stop_training()
                raise RuntimeError("once")
        if state.count == 4:
            step.stop_training()
    assert (state.count, state.applied) == (4, [1])


class LateCoordinator(ScriptedCoordinator):
    """A peer loses the last step while this worker ends the run."""

    def signal_training_done(self) -> None:
        self._note("signal_training_done")
        self.stopped = self.calls.count("signal_training_done") == 2


def test_a_peer_that_lost_the_last_step_is_synchronized_first_and_no_step_comes_after_it() -> None:
    coordinator, state = LateCoordinator(), Counter()
    for step in torchelastic.steps(coordinator, state):
        with step:
            state.count += 1
        if state.count == 3:
            step.stop_training()
    assert (state.count, state.syncs) == (3, 2)
    assert coordinator.calls[-4:] == [
        "signal_training_done", "rendezvous_barrier", "init_process_group", "signal_training_done"
    ]  # fmt: skip


class DistrustfulCoordinator(ScriptedCoordinator):
    """What a GPU has computed cannot be trusted: a collective was aborted, and its kernel has ended all the same."""

    def may_commit(self) -> bool:
        self._note("may_commit")
        return True


def test_a_step_that_may_not_count_is_undone_and_comes_again_in_a_new_group() -> None:
    coordinator, state = DistrustfulCoordinator(), Counter()
    coordinator.fail["may_commit"] = [torchelastic.RetryableException("a collective was aborted")]
    train(coordinator, count_to(3), state)
    assert (state.count, state.applied, state.syncs) == (3, [0], 2)
    assert [str(error) for error in coordinator.errors] == ["a collective was aborted"]


@pytest.mark.parametrize("is_left", [False, True], ids=["finished", "left"])
def test_a_coordinator_whose_run_is_over_trains_no_second_one(is_left: bool) -> None:
    coordinator, state = ScriptedCoordinator(), Counter()
    if is_left:
        for step in torchelastic.steps(coordinator, state):
            with step:
                state.count += 1
            break
    else:
        train(coordinator, count_to(3), state)
    with pytest.raises(torchelastic.NonRetryableException, match="or into two scripts"):
        train(coordinator, count_to(5), state)


def loop_without_with() -> None:
    for _ in torchelastic.steps(ScriptedCoordinator(), Counter()):
        pass


def test_a_loop_without_the_with_block_is_told_so() -> None:
    with pytest.raises(NotImplementedError, match="with step"):
        loop_without_with()


def test_a_coordinator_that_looks_for_no_hangs_takes_slow_sections_all_the_same() -> None:
    coordinator = ScriptedCoordinator()
    with coordinator.slow_section(), coordinator.slow_section():
        pass
    assert coordinator.calls == []


# --- what the loop says of itself -------------------------------------------------------------------------------------


def heard_by(events: list[str]) -> LoopObserver:
    """An observer that notes every event by its name."""
    names = [name for name in vars(LoopObserver) if not name.startswith("_")]
    hooks = {name: lambda *_, _name=name, **__: events.append(_name) for name in names}
    observer: LoopObserver = type("Hears", (LoopObserver,), hooks)()
    return observer


def test_an_observer_hears_of_a_group_a_failure_and_the_end_in_this_order() -> None:
    events: list[str] = []
    loop = TrainLoop(ScriptedCoordinator(), Counter(), None, None)
    loop.observer = notify_all(loop.observer, heard_by(events))
    train_step = count_to(2, {1: RuntimeError("once")})
    for step in loop.steps():
        with step:
            train_step(loop.state)  # type: ignore[arg-type]  # it is a Counter
    group = ["group_wanted", "group_formed", "sync_begins", "in_sync"]
    assert events == [
        *group, "step_begins", "step_ends", "step_undone", "group_left",
        *group, *2 * ["step_begins", "step_ends", "step_committed"],
        "step_begins", "step_ends", "training_done", "group_left", "over", "returns",
    ]  # fmt: skip


def test_who_is_told_with_others_hears_after_those_before_and_only_what_it_listens_to() -> None:
    heard: list[str] = []

    class First(LoopObserver):
        def step_committed(self) -> None:
            heard.append("first")

    class Second(LoopObserver):
        def step_committed(self) -> None:
            heard.append("second")

        def over(self) -> None:
            heard.append("over")

    both = notify_all(First(), LoopObserver(), Second())
    both.step_committed()
    both.over()
    both.step_begins()
    assert heard == ["first", "second", "over"]


def test_the_durations_of_0_1_are_published() -> None:
    class Kept(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            assert metric_data.value >= 0
            names.append(metric_data.name)

    names: list[str] = []
    metrics.configure(Kept(), "torchelastic")
    try:
        train(ScriptedCoordinator(), count_to(3, {2: RuntimeError("once")}), Counter())
    finally:
        metrics.configure(metrics.NullMetricHandler(), "torchelastic")
    assert {name: names.count(name) for name in names} == {
        "state_sync.duration.ms": 2,
        "train_step.duration.ms": 5,  # the one that failed, and the one that ended the run
        "inner_train_loop.duration.ms": 2,
        "outer_train_loop.duration.ms": 1,
    }
