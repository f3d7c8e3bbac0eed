"""Saves that fail, whatever they raise, and content that cannot be saved: no run ends late, and each is named once."""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from traceback import StackSummary
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torchelastic
from tests.process.local_ranks import Crew, succeeded
from tests.process.tiered_work import Plain, join, make_state
from tests.pure.worlds_of_one import World
from torchelastic import metrics
from torchelastic.checkpoint import (
    Checkpoint,
    CheckpointManager,
    DiskTier,
    EverySteps,
    FileSystemCheckpointManager,
    MemoryTier,
    TieredCheckpointManager,
)
from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
from torchelastic.checkpoint.policy import SaveDecision, SaveMoment, SavePolicy
from torchelastic.errors import UnfitError
from torchelastic.repeated_failures import is_final

CREW_SIZE = 2
LAST = 6

ERRORS: dict[str, Callable[[], BaseException]] = {
    "a type": lambda: TypeError("of the user's state"),
    "a value": lambda: ValueError("of the user's state"),
    "a key": lambda: KeyError("of the user's state"),
    "too deep": lambda: RecursionError("of the user's state"),
    "the end of an iterator": lambda: StopIteration("of the user's state"),
    "no memory": lambda: MemoryError("of the user's state"),
    "no exception": lambda: CheckpointException("save", {0: (ValueError("of the user's state"), StackSummary())}),
}


class Kept(CheckpointManager):
    """One of a user's own, which has another idea of failures, and calls nothing of its base class."""

    def __init__(self) -> None:
        self.failures = 0  # type: ignore[assignment]
        self.saved: list[bytes] = []

    def create_checkpoint(self) -> Checkpoint:
        return KeptCheckpoint(self.saved)

    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        return None

    def get_latest_checkpoint(self) -> Checkpoint | None:
        return None

    def list_checkpoints(self) -> list[Checkpoint]:
        return []


class KeptCheckpoint(Checkpoint):
    def __init__(self, saved: list[bytes]) -> None:
        self.saved, self.stream = saved, io.BytesIO()

    def open_output_stream(self, key: str) -> BinaryIO:
        return self.stream

    def open_input_stream(self, key: str) -> BinaryIO:
        raise AssertionError

    def commit(self) -> None:
        self.saved.append(self.stream.getvalue())

    def discard(self) -> None: ...


MANAGERS: dict[str, Callable[[Path], CheckpointManager]] = {
    "a disk": lambda folder: TieredCheckpointManager([DiskTier(folder)], policy=EverySteps(1)),
    "memory": lambda folder: TieredCheckpointManager([MemoryTier(folder)], policy=EverySteps(1)),
    "0.1's": FileSystemCheckpointManager,
    "a user's own": lambda folder: Kept(),
}


class SavesAlways(torchelastic.CoordinatorP2P):
    def should_save_checkpoint(self) -> bool:
        return True


@pytest.fixture
def failed() -> Iterator[list[str]]:
    """The names of the metrics that count failures."""
    names: list[str] = []

    class Recorded(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            names.extend([metric_data.name] if metric_data.name == "checkpoint.failed" else [])

    metrics.configure(Recorded(), group="torchelastic")
    yield names
    metrics.configure(metrics.NullMetricHandler(), group="torchelastic")


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def train(state: Any, manager: CheckpointManager | None, at: Callable[[int], None] = lambda step: None) -> Any:
    def train_step(state: torchelastic.ModelState) -> None:
        if state.step == LAST:
            raise StopIteration
        at(state.step)
        state.optimizer.zero_grad()
        state.model(torch.ones(2, 64)).sum().backward()
        state.optimizer.step()

    return torchelastic.train(SavesAlways("gloo"), train_step, state, checkpoint=manager)


@pytest.mark.parametrize("name", MANAGERS)
@pytest.mark.parametrize("kind", ERRORS)
def test_no_run_ends_by_a_save_whatever_it_raises(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, failed: list[str]
) -> None:
    manager, steps = MANAGERS[name](tmp_path), list[int]()
    whole = torchelastic.ModelState.state_dict

    def state_dict(state: torchelastic.ModelState) -> dict[str, Any]:
        if state.step in (3, 4, 5):
            raise ERRORS[kind]()
        return whole(state)

    with patch.object(torchelastic.ModelState, "state_dict", state_dict):
        state = train(make_state(1, 0), manager, steps.append)
    assert (state.step, steps) == (LAST, list(range(LAST)))
    assert len(failed) == 3
    (told,) = errors_in(caplog)
    assert told.startswith("could not save step 3; training goes on, the checkpoint before stays the latest: ")
    assert "of the user's state" in told
    if name != "a user's own":
        assert [failure.partition(":")[0] for failure in manager.failures] == [
            f"could not save step {n}" for n in (3, 4, 5)
        ]
        assert len(manager.list_checkpoints())
    else:
        assert manager.failures == 0
        assert len(manager.saved) == LAST - 3  # type: ignore[attr-defined]


def test_the_process_ends_where_it_is_to_end_also_while_it_saves(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, SystemExit):
        with (
            patch.object(torchelastic.ModelState, "save", side_effect=error),
            pytest.raises(error),
        ):
            train(make_state(1, 0), FileSystemCheckpointManager(tmp_path))


class Late(SavePolicy):
    """Of a user's, that fails after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def decide(self, moment: SaveMoment) -> SaveDecision:
        return SaveDecision(bool(1 // max(0, self.steps - moment.step + 1)), "as it says")


def test_a_policy_that_fails_late_ends_no_run_and_one_that_always_fails_no_long_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(SavesAlways, "should_save_checkpoint", lambda _: False):
        steps: list[int] = []
        with pytest.raises(ZeroDivisionError):
            train(make_state(1, 0), TieredCheckpointManager([DiskTier(tmp_path)], policy=Late(0)), steps.append)
        assert steps == [0]
        manager = TieredCheckpointManager([DiskTier(tmp_path)], policy=Late(3))
        assert train(make_state(1, 0), manager).step == LAST
    (told,) = errors_in(caplog)[-1:]
    assert told.startswith("asking the policy when to save failed; training goes on: ZeroDivisionError")
    assert len(manager.failures) == LAST - 3
    assert [one.sequence_id for one in manager.list_checkpoints()] == [3]


def test_a_failure_that_comes_back_after_a_save_that_succeeded_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves, write = iter([True, False, True, True, False, False]), torchelastic.ModelState.save

    def save(state: torchelastic.ModelState, stream: BinaryIO) -> None:
        if not next(saves):
            raise ValueError("no")
        write(state, stream)

    with patch.object(torchelastic.ModelState, "save", save):
        train(make_state(1, 0), FileSystemCheckpointManager(tmp_path))
    assert [told.partition(";")[0] for told in errors_in(caplog)] == [f"could not save step {step}" for step in (2, 5)]


# --- content that cannot be saved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANAGERS)
def test_content_that_cannot_be_saved_is_refused_by_name_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    state = make_state(1, 0)
    state.extra["where"] = [{"address": IPv4Address(1)}]
    steps: list[int] = []
    with pytest.raises(UnfitError, match=r"extra\['where'\]\[0\]\['address'\] is an ipaddress\.IPv4Address") as refused:
        train(state, MANAGERS[name](tmp_path), steps.append)
    assert isinstance(refused.value, TypeError)
    assert is_final(refused.value), "no restart can help"
    assert not steps
    assert ("allow_pickles" in str(refused.value)) is (name in ("a disk", "memory"))
    train(make_state(1, 0), MANAGERS[name](tmp_path / "again"))


def test_content_that_the_first_step_makes_is_refused_before_the_second(tmp_path: Path) -> None:
    state, steps = make_state(1, 0), list[int]()

    def at(step: int) -> None:
        steps.append(step)
        state.extra["address"] = IPv4Address(1)

    with pytest.raises(UnfitError, match=r"extra\['address'\]"):
        train(state, TieredCheckpointManager([DiskTier(tmp_path)]), at)
    assert steps == [0]


def test_content_that_comes_later_is_named_in_the_step_that_brings_it_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failed: list[str]
) -> None:
    state, manager = make_state(1, 0), TieredCheckpointManager([DiskTier(tmp_path)], policy=EverySteps(100))

    def at(step: int) -> None:
        if step == 3:
            state.extra["seed"] = IPv4Address(1)  # in the place of a number

    with patch.object(SavesAlways, "should_save_checkpoint", lambda _: state.step in (2, 6)):
        train(state, manager, at)
    (told,) = errors_in(caplog)
    assert told.startswith("step 4: no checkpoint can be taken of this state; training goes on")
    assert "extra['seed'] is an ipaddress.IPv4Address" in told
    assert (len(failed), len(manager.failures)) == (1, 1)
    assert [one.sequence_id for one in manager.list_checkpoints()] == [2]


def test_pickles_are_no_content_that_is_refused_where_they_are_allowed(tmp_path: Path) -> None:
    state = make_state(1, 0)
    state.extra["address"] = IPv4Address(1)
    train(state, TieredCheckpointManager([DiskTier(tmp_path)], policy=EverySteps(2), allow_pickles=True))
    again = make_state(2, 0)
    train(again, TieredCheckpointManager([DiskTier(tmp_path)], allow_pickles=True))
    assert again.extra["address"] == IPv4Address(1)


class Snapshots(torchelastic.State):
    """As in 0.1: its snapshot is what is saved."""

    def __init__(self, content: Any) -> None:
        self.content, self.step = content, 0

    def sync(self, *args: Any) -> None: ...

    def capture_snapshot(self) -> Any:
        return {"content": self.content, "step": self.step}

    def apply_snapshot(self, capture_snapshot: Any) -> None:
        self.content, self.step = capture_snapshot["content"], capture_snapshot["step"]


class Unpickling(Snapshots):
    def load(self, stream: BinaryIO) -> None:
        self.apply(torch.load(stream, weights_only=False))


def count_to(last: int, state: Snapshots, manager: CheckpointManager) -> None:
    def train_step(state: Snapshots) -> None:
        if state.step == last:
            raise StopIteration
        state.step += 1

    torchelastic.train(SavesAlways("gloo"), train_step, state, checkpoint=manager)


def test_a_snapshot_that_the_default_load_would_refuse_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=r"content\['address'\] is an ipaddress"):
        count_to(3, Snapshots({"address": IPv4Address(1)}), FileSystemCheckpointManager(tmp_path))
    count_to(3, Snapshots({"day": datetime.date(2026, 1, 2)}), FileSystemCheckpointManager(tmp_path))
    resumed = Snapshots(None)
    count_to(3, resumed, FileSystemCheckpointManager(tmp_path))
    assert resumed.content == {"day": datetime.date(2026, 1, 2)}


def test_who_loads_by_a_method_of_their_own_saves_whatever_that_reads(tmp_path: Path) -> None:
    count_to(3, Unpickling({"address": IPv4Address(1)}), FileSystemCheckpointManager(tmp_path))
    resumed = Unpickling(None)
    count_to(3, resumed, FileSystemCheckpointManager(tmp_path))
    assert resumed.content == {"address": IPv4Address(1)}


class Unready(Snapshots):
    """Has no tree before its first step."""

    def checkpoint_tree(self) -> Any:
        if self.step == 0:
            raise AttributeError("there is no loss yet")
        return {"step": self.step}


def test_a_state_of_the_users_own_that_cannot_be_tried_yet_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = TieredCheckpointManager([DiskTier(tmp_path)])
    count_to(3, Unready(None), manager)
    assert not errors_in(caplog)
    assert "it is not known whether this state can be saved, since trying failed: AttributeError" in caplog.text
    assert len(manager.list_checkpoints()) == 3


# --- several ranks ----------------------------------------------------------------------------------------------------


def save_where_one_rank_fails(folder: str, which: int, kind: str) -> Any:
    """Three saves, of which one rank cannot do the second."""
    peers, world, state = join(), World(), make_state(7, 1)
    with patch.object(world, "peers", lambda: peers):
        manager = TieredCheckpointManager([DiskTier(Path(folder))], policy=EverySteps(1), patience_s=30.0)
        checkpoints = LoopCheckpoints(world, manager)
        checkpoints.enter_group(state, peers.rank)
        checkpoints.in_sync(state)
        for step in (2, 3, 4):
            checkpoints.step_committed()
            fails = step == 3 and peers.rank == which
            with (
                patch.object(state, "checkpoint_tree", side_effect=ERRORS[kind]())
                if fails
                else patch.object(state, "content_changes", state.content_changes)
            ):
                checkpoints.after_step(state)
            assert manager.wait(20.0), "nobody waits for the rank that has failed"
    dist.barrier()
    failures = list(manager.failures)
    saved = [one.sequence_id for one in manager.list_checkpoints()]
    manager.close()
    return {"failures": failures, "saved": saved}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["a type", "no exception"])
def test_the_others_go_on_where_one_rank_cannot_save(crew: Crew, tmp_path: Path, which: int, kind: str) -> None:
    answers = succeeded(crew.run(save_where_one_rank_fails, str(tmp_path), which, kind, ranks=2))
    assert [answer["saved"] for answer in answers] == [[4, 2]] * 2
    (failure,) = answers[which]["failures"]
    assert "of the user's state" in failure
    if which == 1:
        (failure,) = answers[0]["failures"]
        assert "rank 1: " in failure


def test_a_tier_that_raises_no_exception_costs_that_save_alone(tmp_path: Path) -> None:
    class Broken(DiskTier):
        calls = 0

        def put(self, shard: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise ERRORS["no exception"]()
            return super().put(shard)

    manager = TieredCheckpointManager([Broken(tmp_path)], policy=EverySteps(2))
    train(make_state(1, 0), manager)
    assert [one.sequence_id for one in manager.list_checkpoints()][:2] == [6, 5]
    (failure,) = manager.failures
    assert "in the disk tier: CheckpointException" in failure
    manager.close()


def test_a_state_without_a_tree_fails_on_the_rank_that_saves_it(tmp_path: Path) -> None:
    manager, state, world = TieredCheckpointManager([DiskTier(tmp_path)]), Plain(b"x"), World()
    checkpoints = LoopCheckpoints(world, manager)
    checkpoints.enter_group(state, 0)
    with patch.object(state, "save", side_effect=TypeError("of the user's state")):
        checkpoints.save_alone(state)
    assert "of the user's state" in manager.failures[0]
    manager.close()
