from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from torchelastic import checkpoint
from torchelastic.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    FileSystemCheckpointManager,
    api,
    get_checkpoint_manager,
    set_checkpoint_manager,
)
from torchelastic.checkpoint.api import load_latest, save


class ByteState:
    """A state that is just bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def save(self, stream: BinaryIO) -> None:
        stream.write(self.data)

    def load(self, stream: BinaryIO) -> None:
        self.data = stream.read()


class MemoryCheckpoint(Checkpoint):
    """One of a user's own, as 0.1 allowed it: what it keeps is gone once its stream is closed."""

    def __init__(self, kept: list[bytes]) -> None:
        self.kept = kept
        self.stream = io.BytesIO()

    def open_output_stream(self, key: str) -> BinaryIO:
        return self.stream

    def open_input_stream(self, key: str) -> BinaryIO:
        return io.BytesIO(self.kept[-1])

    def commit(self) -> None:
        self.kept.append(self.stream.getvalue())

    def discard(self) -> None:
        self.kept.clear()


class MemoryManager(CheckpointManager):
    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def create_checkpoint(self) -> Checkpoint:
        return MemoryCheckpoint(self.kept)

    def get_checkpoint(self, sequence_id: int) -> Checkpoint:
        return MemoryCheckpoint(self.kept[: sequence_id + 1])

    def list_checkpoints(self) -> list[Checkpoint]:
        return [self.get_checkpoint(number) for number in range(len(self.kept))]  # the oldest first

    def get_latest_checkpoint(self) -> Checkpoint | None:
        return self.get_checkpoint(len(self.kept) - 1) if self.kept else None


class ClosingState(ByteState):
    """Closes the stream itself, as 0.1 allowed it."""

    def save(self, stream: BinaryIO) -> None:
        with stream:
            super().save(stream)


class FailingState(ByteState):
    """Fails in the middle of saving, or after it has read everything."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(b"half of it")
        self.error = error

    def save(self, stream: BinaryIO) -> None:
        super().save(stream)
        raise self.error

    def load(self, stream: BinaryIO) -> None:
        super().load(stream)
        raise self.error


@pytest.fixture
def manager(tmp_path: Path) -> FileSystemCheckpointManager:
    return FileSystemCheckpointManager(tmp_path / "checkpoints")


@pytest.fixture
def folder(manager: FileSystemCheckpointManager, tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def loaded(manager: CheckpointManager) -> bytes | None:
    state = ByteState()
    return state.data if load_latest(manager, state) is not None else None


@pytest.mark.parametrize("error", [ValueError("wrong shape"), OSError(5, "of the user"), EOFError(), KeyError("layer")])
def test_what_load_raises_on_intact_bytes_propagates_unchanged(
    manager: FileSystemCheckpointManager, error: Exception
) -> None:
    for data in (b"older", b"newer"):
        save(manager, ByteState(data))
    state = FailingState(error)
    with pytest.raises(type(error)) as info:
        load_latest(manager, state)
    assert info.value is error
    assert state.data == b"newer"


@pytest.mark.parametrize(
    "error", [ValueError("user"), RuntimeError("user"), StopIteration(), OSError("user"), KeyboardInterrupt()]
)
def test_a_save_that_fails_leaves_nothing_and_keeps_its_error(
    manager: FileSystemCheckpointManager, folder: Path, error: BaseException
) -> None:
    save(manager, ByteState(b"good"))
    with pytest.raises(type(error)) as info:
        save(manager, FailingState(error))
    assert info.value is error
    assert [path.name for path in folder.iterdir()] == ["0"]
    assert loaded(manager) == b"good"


def test_a_checkpoint_without_the_default_stream_is_not_passed_over(manager: FileSystemCheckpointManager) -> None:
    save(manager, ByteState(b"older"))
    checkpoint = manager.create_checkpoint()
    checkpoint.open_output_stream("weights").close()
    checkpoint.commit()
    with pytest.raises(CheckpointError, match=r"/1 has no stream 'default'; it has 'weights'"):
        loaded(manager)


def test_a_manager_of_ones_own_commits_before_the_stream_is_closed_as_in_0_1() -> None:
    manager = MemoryManager()
    checkpoint = save(manager, ByteState(b"content"))
    assert isinstance(checkpoint, MemoryCheckpoint)
    assert checkpoint.stream.closed
    assert loaded(manager) == b"content"


def test_a_manager_of_ones_own_is_asked_for_its_latest_however_it_lists_them() -> None:
    manager = MemoryManager()
    assert loaded(manager) is None
    for content in (b"older", b"newer"):
        save(manager, ByteState(content))
    assert loaded(manager) == b"newer"


def test_a_state_may_close_the_stream_itself(manager: FileSystemCheckpointManager) -> None:
    save(manager, ClosingState(b"content"))
    assert loaded(manager) == b"content"


@pytest.fixture
def _no_manager_afterwards() -> Iterator[None]:
    yield
    set_checkpoint_manager(None)


@pytest.mark.usefixtures("_no_manager_afterwards")
def test_a_second_state_is_not_saved_behind_the_first_in_its_folder(tmp_path: Path) -> None:
    generator, critic = ByteState(b"generator"), ByteState(b"critic")
    save(FileSystemCheckpointManager(tmp_path), generator)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"another ByteState of this process.*a folder of its own"):
            save(FileSystemCheckpointManager(tmp_path), critic)
        save(FileSystemCheckpointManager(tmp_path), generator)
    load_latest(FileSystemCheckpointManager(tmp_path), generator)
    assert generator.data == b"generator"
    assert len(FileSystemCheckpointManager(tmp_path).list_checkpoints()) == 3


def test_a_state_that_has_loaded_anothers_goes_on_from_it_with_a_warning_and_the_other_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ByteState(b"first"), ByteState()
    manager = FileSystemCheckpointManager(tmp_path)
    save(manager, first)
    load_latest(manager, second)
    assert "was saved in this process, by another ByteState: this one goes on from there" in caplog.text
    save(manager, first)  # who loads a copy to look at it is in nobody's way
    load_latest(manager, second)
    second.data = b"second"
    save(manager, second)
    with pytest.raises(CheckpointError, match="another ByteState of this process"):
        save(manager, first)


def test_states_that_are_not_used_any_more_or_whose_checkpoints_are_gone_are_in_nobodys_way(tmp_path: Path) -> None:
    manager = FileSystemCheckpointManager(tmp_path)
    for number in range(3):
        save(manager, ByteState(bytes([number])))  # an adapter that is made for each save, say
    kept = ByteState(b"kept")
    save(manager, kept)
    shutil.rmtree(tmp_path / "3")
    save(manager, ByteState(b"afresh"))
    assert len(manager.list_checkpoints()) == 4


def test_the_manager_of_the_process_is_the_one_set_last(manager: FileSystemCheckpointManager) -> None:
    assert get_checkpoint_manager() is None
    set_checkpoint_manager(manager)
    assert get_checkpoint_manager() is api.get_checkpoint_manager() is manager


def test_checkpoints_need_no_torch_and_both_front_doors_have_all_names() -> None:
    program = """
import sys
names = ["Checkpoint", "CheckpointManager", "FileSystemCheckpointManager", "set_checkpoint_manager",
         "get_checkpoint_manager"]
import torchelastic.checkpoint
assert "torchelastic.checkpoint.api" not in sys.modules
import torchelastic.checkpoint.api
assert "torchelastic.checkpoint.compat.elastic01.file_system" not in sys.modules
for name in names:
    assert getattr(torchelastic.checkpoint, name) is getattr(torchelastic.checkpoint.api, name), name
    assert name in dir(torchelastic.checkpoint) and name in torchelastic.checkpoint.__all__
from torchelastic.checkpoint.api import *
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(hasattr(checkpoint, name) for name in dir(checkpoint)), "those of the tiers need torch"
