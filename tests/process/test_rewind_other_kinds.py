"""Checkpoints of which nobody knows a rewind: `torchelastic checkpoint rewind` says which ones to move, and where."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.process.command_checkpoints import Capture, add_local, lines_of, run
from tests.process.memory_saves import quietly
from torchelastic.checkpoint import DurableTier, FileSystemCheckpointManager, KeepLast
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Number:
    value = 0

    def save(self, stream: BinaryIO) -> None:
        torch.save({"value": self.value}, stream)

    def load(self, stream: BinaryIO) -> None:
        self.value = torch.load(stream)["value"]


def streams(folder: Path, *values: int) -> int | None:
    """Goes on from the newest one, and saves these; returns which one that was."""
    manager, state = FileSystemCheckpointManager(folder), Number()
    loaded = load_latest(manager, state)
    began_at = None if loaded is None else state.value
    for value in values:
        state.value = value
        save(manager, state)
    return began_at


def local(folder: Path, *values: int) -> int | None:
    """The same."""
    manager = LocalCheckpointManager(folder, keep=9)
    try:
        loaded: Any = None if manager.find_latest() < 0 else manager.load()[0]
        began_at = None if loaded is None else int(loaded.state_dict["w"].item())
        for value in values:
            manager.save(BasicTensorAwareStateDict({"w": torch.tensor([value])}), value)
    finally:
        manager.close()
    return began_at


def in_memory(folder: Path, *values: int) -> int | None:
    """The same, of the durable copies: what is in memory is lost each time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        base = CheckpointContainerId(memory)
        objects = CheckpointObjectManager(durable=DurableTier(folder.as_uri(), KeepLast(9)))
        replication = ReplicationManager()
        replication.initialize(objects)
        loader = DefaultCheckpointLoader(objects, replication)
        newest, state = loader.get_latest_complete_checkpoint(base), {"w": torch.zeros(1)}
        if newest is not None:
            reader = MemoryStorageReader(checkpoint_loader=loader)
            quietly(dcp_load, state, checkpoint_id=str(newest), storage_reader=reader)
        saver = DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=replication)
        for value in values:
            name = CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(value))
            writer = MemoryStorageWriter(saver)
            quietly(dcp_save, {"w": torch.tensor([float(value)])}, checkpoint_id=str(name), storage_writer=writer)
            assert objects.wait_for_durable(60.0)
        replication.shutdown()
    return None if newest is None else int(state["w"].item())


@pytest.mark.parametrize("life", [streams, local, in_memory])
def test_what_is_said_to_be_moved_is_what_is_in_the_way(
    tmp_path: Path, tmpfs: Path, life: Callable[..., int | None], capsys: Capture
) -> None:
    folder = (tmpfs if life is local else tmp_path) / "run"
    assert life(folder, 0, 1, 2, 3, 4) is None
    assert life(folder) == 4
    code, out, err = run(capsys, "rewind", folder, "--to", 2)
    assert (code, out) == (2, "")
    assert "knows of no rewind" in err
    said = err.strip().rpartition(": ")[2].split(", ")
    assert len(said) == 2
    (tmp_path / "away").mkdir()
    for one in map(Path, said):
        one.rename(tmp_path / "away" / one.name) if one.stat().st_dev == tmp_path.stat().st_dev else remove(one)
    assert life(folder, 3) == 2
    assert life(folder) == 3
    assert {one["step" if "step" in one else "id"] for one in lines_of(capsys, "ls", folder)} == {0, 1, 2, 3}
    assert run(capsys, "verify", folder)[0] == 0
    assert "the newest, as it is" in run(capsys, "rewind", folder, "--to", 9)[2]


def remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_local_checkpoints_of_several_sessions_are_not_mixed_up(tmp_path: Path, capsys: Capture) -> None:
    add_local(tmp_path, 1)
    add_local(tmp_path, 2)
    (tmp_path / "session").rename(tmp_path / "a")
    add_local(tmp_path, 3)
    code, out, err = run(capsys, "rewind", tmp_path, "--to", 20)
    assert (code, out) == (2, "")
    assert f"of 2 sessions: give the folder of one, such as {tmp_path / 'a'}" in err
    assert "step-000000020" in run(capsys, "rewind", tmp_path / "a", "--to", 10)[2].rpartition(": ")[2]
