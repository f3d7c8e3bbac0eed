"""Everything that the engine does to a disk, one method per thing that can fail.

Tests subclass it to kill the process, to write short or to fill the disk at the n-th call; nothing else in this package
creates, writes, renames or removes a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.processes.file_locks import lock_file

#: How often, and after what pause, a file is created again that was taken for a left-over.
CREATE_ATTEMPTS, CREATE_PAUSE_S = 50, 0.01


def file_system_of(path: Path) -> str:
    """The type of the file system that a path lies on; "" if nobody knows."""
    real = str(path.resolve())
    mounted = [one for one in psutil.disk_partitions(all=True) if _is_below(real, one.mountpoint)]
    # what was mounted last hides what was there before
    return max(mounted, key=lambda one: len(one.mountpoint)).fstype if mounted else ""


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")  # as text: there may be hundreds of mounts


def is_in_memory(path: Path) -> bool:
    """Whether a path lies on a file system that is memory (tmpfs, ramfs), so that its pages are never read again."""
    return file_system_of(path) in ("tmpfs", "ramfs")


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable (files are made durable by their own fsync). Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot do this for folders; they order names themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> BaseException | None:
    """Removes a folder as far as it can be; returns the first refusal. What is gone already is none."""
    refused: list[BaseException] = []

    def note(_call: object, _path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            refused.append(error)

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=note)
    else:
        shutil.rmtree(path, onerror=lambda call, name, raised: note(call, name, raised[1]))
    return refused[0] if refused else None


@contextmanager
def replacing(path: Path, hidden: Path, mode: Literal["w", "xb"]) -> Iterator[IO[Any]]:
    """A new file, which takes the place of `path` in one step when it is on the disk; removed where anything fails.

    Args:
        path: there may be a file. Its folder is not made durable: see `fsync_folder`.
        hidden: what it is called until then; in the same folder.
        mode: to open it.

    Raises:
        OSError: the disk refuses.
    """
    try:
        with hidden.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


class Disk:
    """The real one. Every method that fails raises a `CheckpointError`, which names the place and the remedy."""

    def create(self, path: Path) -> int:
        """Creates a file that must not exist yet, locks it (flock), and returns a descriptor to read and write it.

        The lock tells others on this host that its writer lives: see `pool.remove_left_overs`.
        """
        with explained("create a file of the checkpoint", path):
            descriptor = self._create_locked(path, may_exist=False)
            for _ in range(CREATE_ATTEMPTS):
                if descriptor is not None:
                    return descriptor
                time.sleep(CREATE_PAUSE_S)
                descriptor = self._create_locked(path, may_exist=True)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    @staticmethod
    def _create_locked(path: Path, *, may_exist: bool) -> int | None:
        """None where somebody took the file for a left-over, in the moment between its creation and its lock.

        That file is left to whoever took it: two removals of one name could hit the next file of that name.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if may_exist:
                return None
            raise
        try:
            lock_file(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)
        return None

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        """Reserves room, so that writing through a memory map cannot run out of it."""
        with explained("reserve room for the checkpoint", path):
            os.posix_fallocate(descriptor, 0, size_bytes)

    def store(self, memory: memoryview, begin: int, data: bytes) -> None:
        """Writes into a memory map."""
        memory[begin : begin + len(data)] = data

    def write(self, descriptor: int, buffers: Sequence[memoryview], path: Path) -> None:
        """Writes all of the buffers at the position of the descriptor, also where the system writes only a part."""
        with explained("write the checkpoint", path):
            for buffer in buffers:
                left = buffer
                while left.nbytes:
                    written = self.write_some(descriptor, left)
                    if written <= 0:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    left = left[written:]

    def write_some(self, descriptor: int, buffer: memoryview) -> int:
        """One system call; returns how many bytes were taken."""
        return os.write(descriptor, buffer)

    def write_at(self, descriptor: int, data: bytes, begin: int, path: Path) -> None:
        """Writes at a place; the position stays."""
        with explained("write the checkpoint", path):
            while data:
                written = os.pwrite(descriptor, data, begin)
                if written <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                data, begin = data[written:], begin + written

    def sync(self, descriptor: int, path: Path) -> None:
        """Returns when the file is on the disk."""
        with explained("write the checkpoint", path):
            os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk."""
        with explained("publish the checkpoint", path):
            fsync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder another name in one step; a file of that name is replaced."""
        with explained("publish the checkpoint", target):
            source.rename(target)

    def publish(self, source: Path, target: Path) -> None:
        """Gives a file a name that must not be taken yet, in one step."""
        with explained("publish the checkpoint", target):
            os.link(source, target)
        try:
            self.remove(source)
        except CheckpointError:
            pass  # it is published; the other name is a left-over, and is removed as one

    def remove(self, path: Path) -> None:
        """Removes a file; it may be gone already."""
        with explained("remove a file of a checkpoint", path):
            path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Removes a folder and all that is in it, also where a part is refused or gone; it may be gone already."""
        with explained("remove a checkpoint", path):
            refused = remove_tree(path)
            if refused is not None:
                raise refused

    def make_folder(self, path: Path) -> None:
        """Creates a folder and its parents; it may exist."""
        with explained("create a folder for checkpoints", path):
            path.mkdir(parents=True, exist_ok=True)


#: What is used where the caller gives none.
REAL_DISK = Disk()
