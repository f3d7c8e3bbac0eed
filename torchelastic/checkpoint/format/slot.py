"""A slot: memory that holds one shard, allocated once, touched once, and used again for the next save.

Fresh memory costs a page fault per 4 KiB, which is two to four times the copy itself; so does a new file on tmpfs. A
slot on tmpfs is the file: what was copied into it only needs its header and a name.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.format.disk import HIDDEN, REAL_DISK, Disk
from torchelastic.checkpoint.format.header import PAGE_BYTES, align
from torchelastic.checkpoint.format.shard_writing import share_lock
from torchelastic.file_systems import Call
from torchelastic.processes.dropped import when_dropped
from torchelastic.processes.file_locks import is_file_at, lock_file
from torchelastic.processes.held_files import HeldFile

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _SlotFile:
    """The file of a slot, apart from it: somebody has to let it go when the slot is gone."""

    path: Path | None
    disk: Disk
    held: HeldFile = field(default_factory=lambda: HeldFile(-1))

    @property
    def descriptor(self) -> int:
        """Of the open file; -1: it is closed, or this is a fork of the process that has it."""
        return self.held.descriptor

    def close(self) -> None:
        """Closes it, and so lets its lock go; the file stays."""
        self.held.close()

    def let_go(self) -> None:
        """Of a slot that was dropped without `close`: a hidden file is of no use, but to the parent of a fork."""
        is_open = self.descriptor >= 0
        self.close()
        if is_open and self.path is not None and self.path.name.startswith(HIDDEN):
            with contextlib.suppress(CheckpointError):
                self.disk.remove(self.path)


class Slot:
    """A writable memory map: of a file, or of anonymous memory where `path` is None. Used by one thread at a time.

    One that is dropped with whoever had it lets its file go: a hidden one is removed, one that was published stays.

    Args:
        capacity_bytes: how long it is; rounded up to pages. On a file the space is reserved at once, so a full disk is
            an error here and never a signal (SIGBUS) in the middle of a copy.
        path: a file to create; it must not exist.
        disk: what touches files.

    Attributes:
        capacity_bytes: its length.
        memory: all of it as a uint8 tensor; writing to it writes to the file.

    Raises:
        CheckpointError: the file cannot be created or has no room.
    """

    def __init__(self, capacity_bytes: int, path: Path | None = None, *, disk: Disk = REAL_DISK) -> None:
        self.capacity_bytes = max(align(capacity_bytes, PAGE_BYTES), PAGE_BYTES)
        self.disk = disk
        self._file = _SlotFile(path, disk)
        self._pinned: bool | None = None  # None: nobody has asked for it
        self._pinned_by = 0  # the GPU whose copies asked for it
        self._map: mmap.mmap | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        if path is not None:
            self._file.held = HeldFile(self.disk.create(path))
            when_dropped(self, self._file.let_go)
        try:
            self._map = self._allocate()
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
            self.memory.zero_()  # touched once, so that no save pays for a page fault
        except BaseException:
            self.close()
            if path is not None:
                self.disk.remove(path)
            raise

    def _allocate(self) -> mmap.mmap:
        if self.path is not None:
            self.disk.allocate(self._file.descriptor, self.capacity_bytes, self.path)
            with explained("map memory for the checkpoint", self.path, Call.MMAP):
                # opened once more: the map keeps its file open, also in a fork, which must not have our lock by that
                mapped = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    return mmap.mmap(mapped, self.capacity_bytes)
                finally:
                    os.close(mapped)
        with explained("map memory for the checkpoint", Path("anonymous memory")):
            memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # a first touch is several times as fast, and a recovery waits for it
        return memory

    @property
    def path(self) -> Path | None:
        """Where the file is now; `None` for anonymous memory."""
        return self._file.path

    @property
    def is_gone(self) -> bool:
        """Whether somebody else has removed its file, or put another one in its place."""
        return self.path is not None and not is_file_at(self.path, self._file.descriptor)

    def view(self) -> memoryview:
        """All of it as bytes, without a copy."""
        if self._map is None:
            raise ValueError("the slot is closed")
        return memoryview(self._map)

    def store(self, begin: int, data: bytes) -> None:
        """Writes a few bytes: a header."""
        self.disk.store(self.view(), begin, data)

    def publish(self, target: Path) -> None:
        """Gives the file the name under which it is read, in one step. Raises: CheckpointError if the name is taken."""
        if self.path is None:
            raise ValueError("anonymous memory has no name")
        # shared as long as the slot lives: it keeps others from taking the file for a left-over
        share_lock(self._file.descriptor, self.path)
        self.disk.publish(self.path, target)
        self._file.path = target

    def was_published(self, target: Path) -> None:
        """Somebody else has given the file its name: another process, on behalf of this one."""
        share_lock(self._file.descriptor, target)
        self._file.path = target

    def withdraw(self, hidden: Path) -> bool:
        """Hides a published file, so that it can be written again; false if somebody may still be reading it.

        Raises:
            CheckpointError: the file is gone, or cannot be renamed.
        """
        if self.path is None:
            raise ValueError("anonymous memory has no name")
        self.disk.rename(self.path, hidden)
        self._file.path = hidden
        with explained("lock the checkpoint", hidden):
            try:
                return lock_file(self._file.descriptor, fcntl.LOCK_EX)
            except BlockingIOError:
                return False

    def release_at_once(self) -> None:
        """As `close`, but the memory goes back at once: whoever still has a view of it reads zeros.

        For memory that only an operation of a lost peer may still hold (gloo ends those after a long time), or the
        traceback of an error.
        """
        memory, advice = self._map, mmap.MADV_DONTNEED if self.path is None else mmap.MADV_REMOVE
        self.close()
        if memory is not None:
            with contextlib.suppress(OSError):  # a file system that has no holes in files
                memory.madvise(advice)

    def close(self) -> None:
        """Gives the memory back as soon as nobody uses a view of it; the file stays."""
        if self._pinned:
            with torch.cuda.device(self._pinned_by):  # another thread has the first GPU, and would make use of it here
                _cudart().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._file.close()
        self._map = None  # the memory goes with the last view of it: a place of a stage, a shard that is being sent

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a GPU are fast and run beside everything else. Idempotent.

        Where CUDA cannot (files on a disk, a limit of locked memory) copies take their time, which is said once.
        """
        if self._pinned is not None:
            return
        self._pinned_by = torch.cuda.current_device()
        outcome = _cudart().cudaHostRegister(self.memory.data_ptr(), self.capacity_bytes, 0)
        self._pinned = int(outcome) == 0
        if not self._pinned:
            _say_not_pinned(self.path and self.path.parent, int(outcome))
            with contextlib.suppress(RuntimeError):  # else the next kernel that is started would be said to have failed
                torch.zeros(1, device="cuda")


@functools.cache  # once for each folder
def _say_not_pinned(folder: Path | None, error: int) -> None:
    log.warning(
        "CUDA cannot pin memory of %s (its error %d), so that copies from a GPU are slow: keep checkpoints in memory "
        "below /dev/shm, and raise this process's limit of locked memory (ulimit -l)",
        folder or "this process",
        error,
    )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
