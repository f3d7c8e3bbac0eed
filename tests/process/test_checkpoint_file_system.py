from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint import CheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.compat.elastic01.file_system import FileSystemCheckpoint
from torchelastic.checkpoint.compat.elastic01.staging import STALE_AFTER_S, new_staging_path
from torchelastic.checkpoint.store.manifest import _digest


@pytest.fixture
def manager(tmp_path: Path) -> FileSystemCheckpointManager:
    return FileSystemCheckpointManager(tmp_path)


def write(checkpoint: FileSystemCheckpoint, data: bytes = b"data", key: str = "default") -> FileSystemCheckpoint:
    with checkpoint.open_output_stream(key) as stream:
        stream.write(data)
    return checkpoint


def commit(manager: FileSystemCheckpointManager, data: bytes = b"data") -> FileSystemCheckpoint:
    checkpoint = write(manager.create_checkpoint(), data)
    checkpoint.commit()
    return checkpoint


def read(checkpoint: FileSystemCheckpoint | None, key: str = "default") -> bytes:
    assert checkpoint is not None
    with checkpoint.open_input_stream(key) as stream:
        return stream.read()


def ids(manager: FileSystemCheckpointManager) -> list[int]:
    return [checkpoint.sequence_id for checkpoint in manager.list_checkpoints()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Layout, ids, life of a checkpoint


def test_the_layout_is_that_of_0_1_with_a_manifest(manager: FileSystemCheckpointManager, tmp_path: Path) -> None:
    commit(manager, b"hello")
    assert names(tmp_path) == ["0"]
    assert names(tmp_path / "0") == ["default", "manifest.json"]
    assert (tmp_path / "0" / "default").read_bytes() == b"hello"
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["streams"] == {"default": {"size_bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}}


def test_a_checkpoint_is_seen_only_after_commit(manager: FileSystemCheckpointManager, tmp_path: Path) -> None:
    commit(manager, b"old")
    checkpoint = write(manager.create_checkpoint(), b"new")
    assert ids(manager) == [0]
    assert read(manager.get_latest_checkpoint()) == b"old"
    with pytest.raises(CheckpointError, match="was not committed"):
        checkpoint.open_input_stream("default")
    checkpoint.commit()
    assert ids(manager) == [1, 0]
    assert read(manager.get_latest_checkpoint()) == read(checkpoint) == b"new"


def test_ids_grow_over_committed_uncommitted_and_foreign_names(tmp_path: Path) -> None:
    for name in ("3", "007", "9a", "-8", "²"):
        (tmp_path / name).mkdir()
    (tmp_path / "4").write_text("a file in the way")
    manager = FileSystemCheckpointManager(tmp_path)
    assert manager.create_checkpoint().sequence_id == 5
    assert manager.create_checkpoint().sequence_id == 6
    assert commit(manager).sequence_id == 7
    assert FileSystemCheckpointManager(tmp_path).create_checkpoint().sequence_id == 8
    assert ids(manager) == [7]


def test_discard_removes_what_was_written(manager: FileSystemCheckpointManager, tmp_path: Path) -> None:
    checkpoint = manager.create_checkpoint()
    stream = checkpoint.open_output_stream("default")
    stream.write(b"never closed")
    assert len(names(tmp_path)) == 1
    checkpoint.discard()
    checkpoint.discard()
    assert stream.closed
    assert names(tmp_path) == []
    with pytest.raises(CheckpointError, match="is discarded and cannot be committed"):
        checkpoint.commit()


def test_everything_is_on_the_disk_before_it_is_published_and_the_name_after(
    manager: FileSystemCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A power failure cannot be had in a test; the order of the calls that guard against one can.
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name.partition('-')[0]}")
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> Path:
        calls.append(f"rename to {target.name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    commit(manager)
    parent = tmp_path.name.partition("-")[0]
    assert calls == ["fsync default", "fsync manifest.json", "fsync .tmp", "rename to 0", f"fsync {parent}"]


def test_a_committed_checkpoint_cannot_be_changed(manager: FileSystemCheckpointManager) -> None:
    for checkpoint in (commit(manager), manager.get_checkpoint(0)):
        assert checkpoint is not None
        with pytest.raises(CheckpointError, match="is committed and cannot be written"):
            checkpoint.open_output_stream("more")
        with pytest.raises(CheckpointError, match="is committed and cannot be committed"):
            checkpoint.commit()


@pytest.mark.parametrize("key", ["", ".", "..", ".hidden", "a/b", "../1/default", "nul\0", "manifest.json"])
def test_a_key_that_is_no_file_name_is_refused(manager: FileSystemCheckpointManager, tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="is no key for a stream"):
        manager.create_checkpoint().open_output_stream(key)
    assert names(tmp_path) == []


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "older"])
def test_what_torch_saves_comes_back_checked_whatever_it_does_with_the_stream(
    manager: FileSystemCheckpointManager, as_zip: bool
) -> None:
    """The older format writes storages through the descriptor; and some go back and write again."""
    weight = torch.randn(300, 400)
    checkpoint = manager.create_checkpoint()
    with checkpoint.open_output_stream("default") as stream:
        torch.save({"weight": weight, "step": 3}, stream, _use_new_zipfile_serialization=as_zip)
    with checkpoint.open_output_stream("again") as stream:
        stream.write(b"length unknown, data")
        stream.seek(0)
        stream.write(b"length 0004")
    checkpoint.commit()
    found = manager.get_latest_checkpoint()
    assert read(found, "again") == b"length 0004own, data"
    assert torch.equal(torch.load(io.BytesIO(read(found)), weights_only=True)["weight"], weight)


def test_a_checkpoint_of_a_newer_release_is_neither_damaged_nor_passed_over(
    manager: FileSystemCheckpointManager, tmp_path: Path
) -> None:
    commit(manager)
    (tmp_path / "1").mkdir()
    document: dict[str, object] = {"version": 2}
    document["manifest_sha256"] = _digest(document)
    (tmp_path / "1" / "manifest.json").write_text(json.dumps(document))
    assert ids(manager) == [1, 0]
    with pytest.raises(CheckpointError, match="manifest version 2"):
        read(manager.get_latest_checkpoint())


def test_whoever_may_read_the_folder_may_read_a_checkpoint(
    manager: FileSystemCheckpointManager, tmp_path: Path
) -> None:
    umask = os.umask(0o022)
    try:
        commit(manager)
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "0", *(tmp_path / "0").iterdir())}
    assert modes == {"0": 0o755, "default": 0o644, "manifest.json": 0o644}


# Several writers


def test_two_writers_of_one_id_publish_both_checkpoints(tmp_path: Path) -> None:
    first = write(FileSystemCheckpointManager(tmp_path).create_checkpoint(), b"first")
    second = write(FileSystemCheckpointManager(tmp_path).create_checkpoint(), b"second")
    assert first.sequence_id == second.sequence_id == 0
    second.commit()
    first.commit()
    assert (second.sequence_id, first.sequence_id) == (0, 1)
    assert (read(second), read(first)) == (b"second", b"first")


# Retention


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    manager = FileSystemCheckpointManager(tmp_path, keep=2)
    commit(manager)
    commit(manager)
    (tmp_path / "1" / "default").write_bytes(b"torn")
    (tmp_path / "1" / "manifest.json").write_bytes(b"{")
    commit(manager)
    assert ids(manager) == [2, 0]
    assert names(tmp_path) == ["0", "1", "2"]


def test_a_checkpoint_being_written_survives_the_deletion_of_old_ones(tmp_path: Path) -> None:
    manager = FileSystemCheckpointManager(tmp_path, keep=1)
    slow = write(manager.create_checkpoint(), b"slow")
    commit(manager)
    commit(manager)
    slow.commit()
    assert ids(manager) == [2]
    assert names(tmp_path) == ["2"]


# The folder


def test_a_file_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"choose another checkpoint_dir.*file'"):
        FileSystemCheckpointManager(tmp_path / "file")


def test_a_folder_that_cannot_be_written_is_refused_before_training() -> None:
    # Even the superuser can create nothing here.
    with pytest.raises(CheckpointError, match=r"could not prepare the folder for checkpoints.*'/proc/1'"):
        FileSystemCheckpointManager("/proc/1")


# Left-overs


def left_by(folder: Path, pid: int, scope: str | None = None) -> Path:
    """How a process calls what it writes there; of another host or container with a scope."""
    name = new_staging_path(folder).name.replace(f"-{os.getpid()}-", f"-{pid}-", 1).split("-", 4)
    return folder / "-".join([*name[:3], scope or name[3], name[4]])


def leave_behind(left: Path, age_s: float = 0.0) -> Path:
    left.mkdir()
    (left / "default").write_bytes(b"unfinished")
    then_s = left.stat().st_mtime - age_s
    for path in (left / "default", left):
        os.utime(path, (then_s, then_s))
    return left


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("scope", [None, "0123456789ab"])
def test_a_folder_goes_when_its_process_has_ended_here_or_nobody_touched_it_for_a_day(
    tmp_path: Path, dead_pid: int, scope: str | None
) -> None:
    dead = leave_behind(left_by(tmp_path, dead_pid, scope))
    living = leave_behind(left_by(tmp_path, os.getppid(), scope))
    old = leave_behind(left_by(tmp_path, os.getpid(), scope), STALE_AFTER_S + 1)
    FileSystemCheckpointManager(tmp_path)
    assert dead.exists() == (scope is not None), "a process number of elsewhere proves nothing"
    assert living.exists()
    assert not old.exists()


@pytest.mark.parametrize("name", [".tmp", ".tmp-mine", ".tmp-1-x-y-z", "tmp-1", ".nfs0001"])
def test_other_things_in_the_folder_are_left_alone_however_old(tmp_path: Path, name: str) -> None:
    other = leave_behind(tmp_path / name, STALE_AFTER_S + 1)
    FileSystemCheckpointManager(tmp_path)
    assert other.exists()


def test_what_a_killed_torch_async_checkpoint_has_left_is_removed_too(tmp_path: Path, dead_pid: int) -> None:
    left_by(tmp_path, dead_pid).write_bytes(b"unfinished")
    FileSystemCheckpointManager(tmp_path)
    assert names(tmp_path) == []


def test_a_writer_whose_folder_was_taken_away_publishes_nothing(
    manager: FileSystemCheckpointManager, tmp_path: Path
) -> None:
    commit(manager, b"old")
    checkpoint = write(manager.create_checkpoint(), b"late")
    (left,) = tmp_path.glob(".tmp-*")
    left.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="removed from outside"):
        checkpoint.commit()
    assert ids(manager) == [0]
