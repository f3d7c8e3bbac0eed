"""Disks that are full, limits on files, several processes at once: each with the real thing."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process.forked_ranks import run_ranks, values
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.checkpoint import CheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.checkpoint.compat.elastic01.file_system import FileSystemCheckpoint


class Number:
    """A state whose content tells which one it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def save(self, stream: BinaryIO, /) -> None:
        stream.write(pickle.dumps([self.number] * 10_000))

    def load(self, stream: BinaryIO, /) -> None:
        (self.number,) = set(pickle.load(stream))


def saves_ten(folder: Path) -> list[int]:
    manager, writer, ids = FileSystemCheckpointManager(folder), dist.get_rank(), []
    for step in range(10):
        saved = save(manager, Number(writer * 100 + step))
        assert isinstance(saved, FileSystemCheckpoint)
        ids.append(saved.sequence_id)
    return ids


def test_writers_in_several_processes_overwrite_nothing(tmp_path: Path) -> None:
    outputs = values(run_ranks(saves_ten, tmp_path, ranks=4))
    assert sorted(sequence_id for output in outputs for sequence_id in output) == list(range(40))
    assert all(output == sorted(output) for output in outputs)
    found = set()
    for checkpoint in FileSystemCheckpointManager(tmp_path).list_checkpoints():
        state = Number(-1)
        with checkpoint.open_input_stream("default") as stream:
            state.load(stream)
        found.add(state.number)
    assert found == {writer * 100 + step for writer in range(4) for step in range(10)}


class TensorState:
    """Saved and loaded as users do it."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.arange(size_bytes // 4, dtype=torch.float32)

    def save(self, stream: BinaryIO) -> None:
        torch.save({"tensor": self.tensor}, stream)

    def load(self, stream: BinaryIO) -> None:
        self.tensor = torch.load(stream, weights_only=True)["tensor"]


def assert_a_large_save_fails_and_a_small_one_stays(folder: Path, reason: str) -> None:
    manager = FileSystemCheckpointManager(folder)
    save(manager, TensorState(1 << 19))
    for _ in range(3):
        with pytest.raises(CheckpointError, match=reason):
            save(manager, TensorState(8 << 20))
        assert [path.name for path in folder.iterdir()] == ["0"]
    state = TensorState(0)
    assert load_latest(manager, state) is not None
    assert torch.equal(state.tensor, TensorState(1 << 19).tensor)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", 4 << 20) as folder:
        yield folder


def test_a_full_disk_is_named_although_torch_save_hides_it(small_disk: Path) -> None:
    assert_a_large_save_fails_and_a_small_one_stays(small_disk, r"No space left on device \(the disk is full")


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("file_size_limit")
def test_a_limit_on_file_sizes_is_named_although_torch_save_hides_it(tmp_path: Path) -> None:
    assert_a_large_save_fails_and_a_small_one_stays(tmp_path, r"File too large \(raise the limit")


@pytest.mark.usefixtures("file_size_limit")
def test_a_stream_whose_error_was_swallowed_cannot_be_committed(tmp_path: Path) -> None:
    checkpoint = FileSystemCheckpointManager(tmp_path).create_checkpoint()
    stream = checkpoint.open_output_stream("default")
    try:
        stream.write(bytes(8 << 20))
    except OSError:
        stream.write(b"and so on")
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoint.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_training(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(8 << 20))
    with pytest.raises(CheckpointError, match=r"could not prepare the folder for checkpoints: No space left"):
        FileSystemCheckpointManager(small_disk)


class SavesAlways(torchelastic.CoordinatorP2P):
    """After each step."""

    def should_save_checkpoint(self) -> bool:
        return True


def test_a_disk_that_fills_up_costs_a_line_and_training_goes_on(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = torch.nn.Linear(1200, 1200)  # 5.8 MB
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def train_step(state: torchelastic.ModelState) -> None:
        if state.step == 3:
            raise StopIteration
        state.model(torch.ones(1, 1200)).sum().backward()
        state.optimizer.step()

    manager = FileSystemCheckpointManager(small_disk)
    torchelastic.train(SavesAlways(), train_step, state, checkpoint=manager)
    failed = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage().split(";")[0] for record in failed] == ["could not save step 1"]
    assert [failure.split(":")[0] for failure in manager.failures] == [f"could not save step {n}" for n in (1, 2, 3)]
    assert all("No space left on device (the disk is full" in failure for failure in manager.failures)
    assert not any(record.exc_info for record in failed), "a traceback says no more"
    assert list(small_disk.iterdir()) == []
