"""The room of a removed file comes back, although tensors were mapped from it; and never a value of theirs changes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from torchelastic.checkpoint.format.mapped_files import MappedFile, can_release, release_removed
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.shards import ShardReader, save_tree

COUNT = 3 * 2**20
SIZE_BYTES = 4 * COUNT


@pytest.fixture
def path(root: Path) -> Path:
    save_tree(root / "shard", {"touched": torch.arange(COUNT), "left": torch.arange(COUNT).float()})
    return root / "shard"


class Held:
    """Tensors that are mapped, and the file, kept open without a lock so that its size can be asked for."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.tensors = mapped(path)

    @property
    def is_right(self) -> bool:
        expected = np.arange(COUNT)  # not by torch, whose threads a child of a fork lacks
        return all(np.array_equal(tensor.numpy(), expected) for tensor in self.tensors.values())

    @property
    def taken_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512


def mapped(path: Path) -> dict[str, torch.Tensor]:
    with ShardReader(path) as reader:
        return reader.map()


@pytest.fixture
def held(path: Path) -> Iterator[Held]:
    held = Held(path)
    yield held
    os.close(held.descriptor)


def test_the_room_of_a_removed_file_comes_back_and_the_tensors_stay(path: Path, held: Held) -> None:
    held.tensors["touched"] += 1
    release_removed()
    assert held.taken_bytes > 3 * SIZE_BYTES, "it has its name"
    path.unlink()
    assert held.taken_bytes > 3 * SIZE_BYTES
    release_removed()
    assert held.taken_bytes == 0
    held.tensors["touched"] -= 1
    assert held.is_right
    held.tensors["left"] += 1
    release_removed()
    assert torch.equal(held.tensors["left"], torch.arange(COUNT).float() + 1)


def test_what_somebody_else_reads_stays(path: Path, held: Held) -> None:
    with ShardReader(path) as other:
        path.unlink()
        release_removed()
        other.verify()
        assert held.taken_bytes > 3 * SIZE_BYTES
    release_removed()
    assert held.taken_bytes == 0
    assert held.is_right


def test_a_reader_that_is_still_open_reads_on(path: Path, held: Held) -> None:
    held.tensors.clear()
    with ShardReader(path) as reader:
        held.tensors = reader.map()
        path.unlink()
        release_removed()
        reader.verify()
    release_removed()
    assert held.taken_bytes == 0
    assert held.is_right


def test_of_several_maps_of_one_file_all_stay(path: Path, held: Held) -> None:
    second = Held(path)
    path.unlink()
    release_removed()
    release_removed()
    assert held.taken_bytes == 0
    assert held.is_right
    assert second.is_right
    os.close(second.descriptor)


def is_right_in_a_child_of_before(held: Held, path: Path) -> bool:
    """Whether a child of a fork sees the right values, after this process has given back what it could."""
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        os._exit(0 if held.is_right else 1)
    path.unlink()
    release_removed()
    os.write(begun, b"!")
    os.close(ready)
    os.close(begun)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_of_a_fork_sees_no_hole(path: Path, held: Held) -> None:
    assert is_right_in_a_child_of_before(held, path)
    assert held.taken_bytes == 0
    assert held.is_right


def no_memory(_: MappedFile) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_without_memory_for_a_copy_the_room_stays_until_there_is_some(
    path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(MappedFile, "make_private", no_memory)
        release_removed()
    assert "keeps its room on tmpfs" in caplog.text
    assert held.taken_bytes > 3 * SIZE_BYTES
    assert held.is_right
    release_removed()
    assert held.taken_bytes == 0
    assert held.is_right


def test_what_a_child_of_a_fork_may_still_need_stays(path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork

    def fork_without_memory() -> int:
        with monkeypatch.context() as patched:
            patched.setattr(MappedFile, "make_private", no_memory)
            return fork()

    monkeypatch.setattr(os, "fork", fork_without_memory)
    assert is_right_in_a_child_of_before(held, path)
    assert held.taken_bytes > 3 * SIZE_BYTES


def test_no_write_of_another_thread_is_lost_meanwhile(path: Path, held: Held) -> None:
    left, over, done = held.tensors["left"], threading.Event(), [0]

    def add() -> None:
        while not over.is_set():
            left.add_(1)
            done[0] += 1

    thread = threading.Thread(target=add)
    thread.start()
    path.unlink()
    while done[0] < 3:
        pass
    release_removed()
    over.set()
    thread.join()
    assert held.taken_bytes == 0
    assert torch.equal(left, torch.arange(COUNT).float() + done[0])


def test_this_kernel_is_asked_whether_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    can_release.cache_clear()
    assert can_release(), "Linux 5.14 or later"
    can_release.cache_clear()
    monkeypatch.setattr("torchelastic.checkpoint.format.mapped_files._MADV_POPULATE_WRITE", mmap.MADV_NORMAL)
    assert not can_release(), "a kernel that says yes and does nothing"
    can_release.cache_clear()
    monkeypatch.setattr("torchelastic.checkpoint.format.mapped_files._MADV_POPULATE_WRITE", 12345)
    assert not can_release(), "a kernel that does not know it"
    can_release.cache_clear()


@pytest.mark.parametrize("can", [True, False])
def test_where_room_cannot_be_had_back_a_copy_is_loaded(root: Path, monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.format.mapped_files.can_release", lambda: can)
    saving = LocalCheckpointManager(root)
    saving.save(BasicTensorAwareStateDict({"w": torch.arange(COUNT)}), 1)
    saving.close()
    resumed = LocalCheckpointManager(root)
    loaded = resumed.load()[0]
    assert (".shard" in Path("/proc/self/maps").read_text()) == can
    assert isinstance(loaded, BasicTensorAwareStateDict)
    assert torch.equal(loaded.state_dict["w"], torch.arange(COUNT))
    resumed.close()
