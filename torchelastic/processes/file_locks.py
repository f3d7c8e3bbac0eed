"""Locks on files (flock), by which the processes of a host tell whether whoever made a file still lives.

The kernel takes a lock away when the last process that has the open file ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchelastic.file_systems import Call


def lock_file(descriptor: int, operation: int) -> bool:
    """Locks an open file (flock) without waiting; false where the file system has no locks.

    Without them (Lustre without `-o flock`) nothing is reused and no left-over is removed: only room is lost.

    Raises:
        BlockingIOError: somebody else holds a lock that excludes this one.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if Call.FLOCK.is_absent_by(error.errno):
            return False
        raise
    return True


def is_file_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still is what has this name: ask after locking it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


@contextmanager
def lock_of_nobody(path: Path) -> Iterator[bool | None]:
    """Holds the lock of a file inside, unless somebody else does: writers and readers keep their files locked.

    Yields:
        Whether it is held, so that no living process has the file; None: nobody can tell, for it is gone (or another
        one has its name by now), or of another user, or the file system has no locks.
    """
    try:
        descriptor = _open(path)
    except OSError:
        yield None
        return
    try:
        is_held: bool | None = (lock_file(descriptor, fcntl.LOCK_EX) and is_file_at(path, descriptor)) or None
    except OSError:
        is_held = False
    try:
        yield is_held
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """For writing, if this user may: NFS and SMB lock a file for one alone only so."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe that somebody put there must not stop us
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError:
        return os.open(path, os.O_RDONLY | flags)
