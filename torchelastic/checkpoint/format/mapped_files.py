"""The room of files that tensors of this process are mapped from: had back once such a file is removed.

`ShardReader.map` returns tensors that lie in the file of a shard: loading them costs no memory. But an optimizer keeps
what it is given, and as long as one tensor lives the kernel keeps the whole file, also once it is removed. So of a
removed file `release_removed`

- has the kernel copy each page that was not written to yet, as it does by itself when one is written
  (MADV_POPULATE_WRITE breaks copy-on-write and writes nothing: neither addresses nor values change, whatever other
  threads do with the tensors meanwhile);
- and makes a hole in the file, which leaves such private copies alone, unless somebody else reads it.

A child of a fork sees the pages as they were then, so they are copied before it.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.file_systems import file_system_of
from torchelastic.processes.dropped import when_dropped
from torchelastic.processes.file_locks import lock_file

log = logging.getLogger(__name__)

#: Linux 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
#: The interpreter's lock is held for so much at a time.
_CHUNK_BYTES = 16 * 2**20


@dataclass(eq=False)
class MappedFile:
    """One map, as long as a tensor lies in it.

    Attributes:
        memory: the map, private to this process.
        descriptor: the open file that it was made of, which has its lock.
        is_private: whether no page of the file is seen in it any more.
        is_shared: whether a child of a fork may still see pages of the file.
        is_read: whether whoever made the map reads the open file for other things, too; set to false by it.
    """

    memory: weakref.ref[mmap.mmap]
    descriptor: int
    is_private: bool = False
    is_shared: bool = False
    is_read: bool = True

    def make_private(self) -> None:
        """Raises: OSError, if there is no memory for it; no value has changed then."""
        memory = self.memory()
        if memory is not None and not self.is_private:
            for begin in range(0, len(memory), _CHUNK_BYTES):
                memory.madvise(_MADV_POPULATE_WRITE, begin, min(_CHUNK_BYTES, len(memory) - begin))
            self.is_private = True

    def release_removed(self) -> None:
        """Raises: OSError, as `make_private`, or if the file cannot be changed."""
        memory = self.memory()  # as long as this lives the descriptor is open
        if memory is None or self.is_shared or self.is_read:
            return
        status = os.fstat(self.descriptor)
        if status.st_nlink or not status.st_blocks:
            return
        self.make_private()
        with suppress(BlockingIOError):  # somebody else reads it: the next time; this map needs no lock any more
            if lock_file(self.descriptor, fcntl.LOCK_EX):
                _make_hole(self.descriptor, status.st_size)

    def close(self) -> None:
        """Forgets it: no tensor lies in it any more."""
        _mapped.discard(self)
        os.close(self.descriptor)


_mapped: set[MappedFile] = set()


def note_mapped(memory: mmap.mmap, descriptor: int) -> MappedFile:
    """Notes a private map that tensors are made of.

    Args:
        memory: the map; noted as long as it lives.
        descriptor: the open file, which holds a lock against whoever would write to it.
    """
    mapped = MappedFile(weakref.ref(memory), os.dup(descriptor))
    _mapped.add(mapped)
    when_dropped(memory, mapped.close)
    return mapped


def release_removed() -> None:
    """Frees the room of files that were removed, and that tensors of this process are mapped from; on any thread.

    Costs memory for what was never written to. Where there is none the room stays taken, and a warning says so.
    """
    for mapped in list(_mapped):
        try:
            mapped.release_removed()
        except OSError as error:
            log.warning("what was loaded keeps its room on tmpfs beside the checkpoints that are kept: %s", error)


def is_to_map(path: str | os.PathLike[str]) -> bool:
    """Whether a shard there is rather mapped than read: on tmpfs it is memory already, and a copy takes more of it.

    But a file that is mapped keeps its room on tmpfs, unless that can be had back when it is removed.
    """
    return file_system_of(Path(path)) == "tmpfs" and can_release()


@functools.cache
def can_release() -> bool:
    """Whether this kernel does what is said above; tried with a file of two pages."""
    size, before, after = 2 * mmap.PAGESIZE, b"before", b"after!"
    try:
        descriptor = os.memfd_create("torchelastic-probe")
        try:
            os.pwrite(descriptor, before, 0)
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) as memory:
                memory.madvise(_MADV_POPULATE_WRITE)
                os.pwrite(descriptor, after, 0)
                was_kept = memory[: len(before)] == before
                _make_hole(descriptor, size)
                is_free = os.fstat(descriptor).st_blocks == 0 and os.pread(descriptor, len(after), 0) != after
                return was_kept and is_free and memory[: len(before)] == before
        finally:
            os.close(descriptor)
    except OSError:
        return False  # a kernel before 5.14


def _make_hole(descriptor: int, size_bytes: int) -> None:
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(writable, size_bytes) as shared:
            shared.madvise(mmap.MADV_REMOVE)
    finally:
        os.close(writable)


def _before_fork() -> None:
    for mapped in list(_mapped):
        try:
            mapped.make_private()
        except OSError:
            mapped.is_shared = True


os.register_at_fork(before=_before_fork)
