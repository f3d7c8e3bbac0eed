"""What a file system does not have, as verbs, for all that this process does below a folder.

    with file_system_without(tmp_path, no_locks(), no_folder_rename()) as refused:
        save(tmp_path)
    refused.require_struck()

The system calls themselves are refused (`os.link`, `fcntl.flock`, ...), whoever makes them; forks inherit that, new
processes do not. For one fault at one call of a `Disk` see `disk_faults`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.format.disk import REAL_DISK
from torchelastic.file_systems import KERNEL_ENOTSUPP


@dataclass(frozen=True)
class FileSystemFault:
    """One call that is always refused; made by the verbs below.

    Attributes:
        verb: what is refused.
        errno: with what.
    """

    verb: str
    errno: int


def no_locks(error: int = KERNEL_ENOTSUPP) -> FileSystemFault:
    """Flock is refused, as on Lustre without `-o flock`: ENOSYS, ENOLCK, EOPNOTSUPP or 524."""
    return FileSystemFault("flock", error)


def no_links(error: int = errno.EPERM) -> FileSystemFault:
    """link(2) is refused, as on FAT (EPERM), or on a bucket behind FUSE (ENOSYS, EOPNOTSUPP)."""
    return FileSystemFault("link", error)


def no_folder_rename(error: int = errno.EXDEV) -> FileSystemFault:
    """A folder cannot be renamed, a file can: layers of overlayfs (EXDEV), some buckets (ENOSYS, EMFILE)."""
    return FileSystemFault("rename of a folder", error)


def no_rename_over(error: int = errno.EPERM) -> FileSystemFault:
    """A file cannot be renamed over another one."""
    return FileSystemFault("rename over a file", error)


def no_rename_of_open_files(error: int = errno.EOPNOTSUPP) -> FileSystemFault:
    """A file that this process has open for writing cannot be renamed: gcsfuse (EOPNOTSUPP), SMB (EBUSY)."""
    return FileSystemFault("rename of an open file", error)


def no_folder_fsync(error: int = errno.ENOSYS) -> FileSystemFault:
    """Fsync of a folder is refused."""
    return FileSystemFault("fsync of a folder", error)


def no_fsync(error: int = errno.ENOSYS) -> FileSystemFault:
    """Fsync of a file is refused."""
    return FileSystemFault("fsync of a file", error)


def busy_unlink(error: int = errno.EBUSY) -> FileSystemFault:
    """No file can be removed, as where another client has it open."""
    return FileSystemFault("unlink", error)


def no_free_space() -> FileSystemFault:
    """Statvfs knows of no blocks, as on many file systems in user space: it says 0 of 0 are free."""
    return FileSystemFault("statvfs", 0)


class Refusals:
    """How often each call was refused by this process.

    Attributes:
        counts: by verb.
    """

    def __init__(self, folder: Path, *faults: FileSystemFault) -> None:
        self._below = os.path.realpath(folder)
        self._errnos = {fault.verb: fault.errno for fault in faults}
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def require_struck(self, *verbs: str) -> None:
        """Raises AssertionError if one of these calls, or of all without arguments, was never refused."""
        missing = [verb for verb in verbs or self._errnos if not self.counts[verb]]
        if missing:
            raise AssertionError(f"never refused: {missing}; refused were {dict(self.counts)}")

    def meet(self, verb: str, place: Any, dir_fd: int | None = None) -> bool:
        """Refuses the call with an error; True if it is one whose answer only changes (statvfs)."""
        if verb not in self._errnos or not self._is_below(place, dir_fd):
            return False
        with self._lock:
            self.counts[verb] += 1
        number = self._errnos[verb]
        if number:
            named = () if isinstance(place, int) else (os.fspath(place),)
            raise OSError(number, os.strerror(number), *named)
        return True

    def _is_below(self, place: Any, dir_fd: int | None) -> bool:
        try:
            if isinstance(place, int):
                path = Path(f"/proc/self/fd/{place}").readlink()
            else:
                path = Path("" if dir_fd is None else f"/proc/self/fd/{dir_fd}") / place
            return str(path.parent.resolve() / path.name).startswith(self._below)
        except OSError:
            return False


@contextmanager
def file_system_without(folder: Path, *faults: FileSystemFault) -> Iterator[Refusals]:
    """Inside, this process and its forks meet these faults below a folder; not for two threads at once.

    Args:
        folder: and all that is in it.
        *faults: see the verbs of this module.

    Yields:
        What was refused.
    """
    refusals = Refusals(folder, *faults)
    homes: list[Any] = [os, vars(pathlib).get("_Normal" + "Accessor")]  # Python 3.10 has the functions twice
    patched = [(fcntl, "flock", _flock), (os, "fsync", _fsync), (os, "statvfs", _statvfs)]
    for home in filter(None, homes):
        patched += [(home, "link", _link), (home, "rename", _rename), (home, "replace", _rename)]
        patched += [(home, "unlink", _unlink)]
    patched.append((os, "remove", _unlink))
    before = [(home, name, home.__dict__[name]) for home, name, _ in patched]
    REAL_DISK.forget_abilities()  # neither what an earlier fault has taught it, nor later what this one does
    try:
        for home, name, wrap in patched:
            real = getattr(home, name)
            setattr(home, name, wrap(real, refusals))
        yield refusals
    finally:
        for home, name, real in before:
            setattr(home, name, real)
        REAL_DISK.forget_abilities()


_Call = Callable[..., Any]


def _flock(real: _Call, refusals: Refusals) -> _Call:
    def flock(file: Any, operation: int) -> Any:
        refusals.meet("flock", file if isinstance(file, int) else file.fileno())
        return real(file, operation)

    return flock


def _fsync(real: _Call, refusals: Refusals) -> _Call:
    def fsync(file: Any) -> Any:
        descriptor = file if isinstance(file, int) else file.fileno()
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        refusals.meet("fsync of a folder" if is_folder else "fsync of a file", descriptor)
        return real(descriptor)

    return fsync


def _statvfs(real: _Call, refusals: Refusals) -> _Call:
    def statvfs(path: Any) -> Any:
        found = real(path)
        if not refusals.meet("statvfs", path):
            return found
        return os.statvfs_result((found.f_bsize, found.f_frsize, *[0] * 6, found.f_flag, found.f_namemax))

    return statvfs


def _link(real: _Call, refusals: Refusals) -> _Call:
    def link(source: Any, target: Any, **options: Any) -> Any:
        refusals.meet("link", target)
        return real(source, target, **options)

    return link


def _rename(real: _Call, refusals: Refusals) -> _Call:
    def rename(source: Any, target: Any, **options: Any) -> Any:
        if Path(source).is_dir() and not Path(source).is_symlink():
            refusals.meet("rename of a folder", source)
        else:
            if os.path.lexists(target):
                refusals.meet("rename over a file", target)
            if _is_open(source):
                refusals.meet("rename of an open file", source)
        return real(source, target, **options)

    return rename


def _is_open(path: Any) -> bool:
    """Whether this process has a file open; in mapped memory alone does not count."""
    at = os.fspath(Path(path).absolute())
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.fspath(one.readlink()) == at:
                return True
    return False


def _unlink(real: _Call, refusals: Refusals) -> _Call:
    def unlink(path: Any, *, dir_fd: int | None = None) -> Any:
        refusals.meet("unlink", path, dir_fd)
        return real(path, dir_fd=dir_fd)

    return unlink
