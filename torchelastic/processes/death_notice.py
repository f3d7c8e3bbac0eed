"""Be notified of a process's death at once, and not only when the kernel has torn it down.

A killed process is gone for its parent (`waitpid`, pidfd) and for its peers (closed connections) only after the kernel
has given its memory back: 40 ms for a small torch process, 150 ms for one with half a gigabyte. But it lets go of the
dying threads' robust futexes first (`set_robust_list(2)`; `mm_release` comes before `exit_mm`). So the process locks a
robust mutex in memory that it shares with its agent, and never unlocks it: when the agent gets the lock, the owner
has died. `benchmarks.death` prints it: 0.3 ms after SIGKILL.

Where something of this is not there (another libc, no shared folder, no room in it) nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

#: <pthread.h> of glibc and musl.
_PROCESS_SHARED, _ROBUST = 1, 1
#: More than a mutex and its attributes take on any platform.
_MUTEX_BYTES, _ATTRIBUTES_BYTES = 128, 64


def notice_path(socket_path: str | Path, pid: int) -> Path:
    """Where the process with this id leaves its mutex for the agent that listens at `socket_path`."""
    return Path(f"{socket_path}.{pid}")


def leave_notice(path: Path) -> bool:
    """Lock a new mutex for ever; called on the main thread, whose end is that of the process.

    Returns:
        False: it could not be done, or this is not the main thread.
    """
    if threading.get_native_id() != os.getpid():
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # all of it now: writing to a hole of a full disk would end the process by SIGBUS
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            mutex = _map(descriptor)
        finally:
            os.close(descriptor)
        libc, attributes = ctypes.CDLL(None), (ctypes.c_char * _ATTRIBUTES_BYTES)()
        failures = [
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
            libc.pthread_mutex_init(mutex, attributes),
            libc.pthread_mutex_lock(mutex),
        ]
    except (OSError, AttributeError) as error:
        log.debug("no notice of death: %s", error)
        return False
    # also while the interpreter takes itself down the memory must stay mapped: the kernel looks into it after that
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mutex))
    return not any(failures)


def take_notice(path: Path) -> ctypes.Array[ctypes.c_char] | None:
    """Map what `leave_notice` has left, and remove the file; None if there is nothing that can be used."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            path.unlink()
            return _map(descriptor) if os.fstat(descriptor).st_size == mmap.PAGESIZE else None
        finally:
            os.close(descriptor)
    except OSError as error:
        log.debug("no notice of death: %s", error)
        return None


def wait_for_death(mutex: ctypes.Array[ctypes.c_char]) -> bool:
    """Block this thread until the process that has left the notice dies. False: it cannot be told."""
    try:
        return int(ctypes.CDLL(None).pthread_mutex_lock(mutex)) == errno.EOWNERDEAD
    except AttributeError:
        return False


def _map(descriptor: int) -> ctypes.Array[ctypes.c_char]:
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    return (ctypes.c_char * _MUTEX_BYTES).from_buffer(memory)
