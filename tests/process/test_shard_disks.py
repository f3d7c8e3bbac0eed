"""Disks that are really full or read-only, and files that may not grow. They are mounted, which only root may do."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.small_tmpfs import small_tmpfs
from tests.process.tier_saves import context_of, name_at, restore, save
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.shards import load_tree, save_tree
from torchelastic.checkpoint.store import DiskTier, DurableTier, MemoryTier, Tier
from torchelastic.file_systems import is_in_memory

SIZE_BYTES = 2**20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", SIZE_BYTES) as folder:
        yield folder


def remount_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def state(size_bytes: int, number: int = 0) -> dict[str, Any]:
    return {"w": torch.full((size_bytes // 4,), float(number)), "n": number}


def test_a_full_disk_leaves_nothing_behind_and_the_next_save_works(small: Path) -> None:
    save_tree(small / "old", state(SIZE_BYTES // 4, 1))
    for make in (lambda: save_tree(small / "new", state(SIZE_BYTES)), lambda: Slot(SIZE_BYTES + 4096, small / "slot")):
        with pytest.raises(CheckpointError, match="the disk is full; free space") as caught:
            make()
        assert caught.value.errno == errno.ENOSPC
        assert Path(str(caught.value.filename)).parent == small
        assert [path.name for path in small.iterdir()] == ["old"]
    save_tree(small / "new", state(SIZE_BYTES // 4, 2))
    assert (load_tree(small / "old")["n"], load_tree(small / "new")["n"]) == (1, 2)


def test_a_read_only_disk_can_be_read_and_says_what_to_do(small: Path) -> None:
    folder = small
    save_tree(folder / "old", state(64, 1))
    (folder / ".tmp-1-left").touch()
    remount_read_only(folder)
    for make in (lambda: save_tree(folder / "new", state(64)), lambda: Slot(64, folder / "slot")):
        with pytest.raises(CheckpointError, match="it is mounted read-only; remount it"):
            make()
    assert load_tree(folder / "old")["n"] == 1
    assert remove_left_overs(folder) == 0
    with pytest.raises(CheckpointError, match="read-only"):
        SlotPool(folder).delete(folder / "old")


TIERS: dict[str, Callable[[Path], Tier]] = {
    "shared": lambda folder: DiskTier(folder / "tier", KeepLast(2)),
    "private": lambda folder: DiskTier(folder / "tier", KeepLast(2), shared=False),
    "memory": lambda folder: MemoryTier(folder / "tier"),
    "durable": lambda folder: DurableTier(f"file://{folder}/tier", KeepLast(2)),
}


@pytest.mark.parametrize("make", TIERS.values(), ids=TIERS.keys())
def test_a_tier_that_is_read_only_is_named_and_can_be_read(make: Callable[[Path], Tier], small: Path) -> None:
    tier = make(small)
    context = context_of(tier)
    tier.prepare(context)
    save([tier], name_at(1, epoch=context.epoch))
    tier.close()
    remount_read_only(small)
    reader = make(small)
    assert restore(reader) == 1
    with pytest.raises(CheckpointError, match=r"[Rr]ead-only") as raised:
        reader.prepare(context_of(reader, epoch=context.epoch + 1))
    assert str(small) in str(raised.value)


def test_what_lies_in_memory_is_known(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert is_in_memory(Path("/dev/shm") / "not" / "there" / "yet")
    assert not is_in_memory(Path("/proc/self"))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel was built without huge pages"
)
def test_memory_without_a_file_asks_for_huge_pages() -> None:
    slot = Slot(8 * 2**20)
    address = slot.memory.data_ptr()
    areas = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    flags = next(flags for begin, end, flags in areas if int(begin, 16) <= address < int(end, 16))
    assert "hg" in flags.split()  # a recovery waits for the first touch of a new slot


def test_a_file_that_somebody_reads_for_a_moment_is_replaced_a_little_later(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    target.write_text("old")
    readers = iter([errno.EACCES, errno.EBUSY])  # as SMB says it
    real = os.rename

    def refused(source: Path, target: Path) -> None:
        number = next(readers, None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", refused)
        write_whole(target, [memoryview(b"new")], Disk())
    assert target.read_text() == "new"
    assert next(readers, None) is None, "both were met"


def test_left_overs_are_removed_where_only_a_file_open_for_writing_is_locked_for_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".tmp-1-0").write_text("of a writer that was killed")
    real = fcntl.flock

    def as_on_nfs(descriptor: int, operation: int) -> None:
        is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and not is_writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    assert remove_left_overs(tmp_path) == 1
