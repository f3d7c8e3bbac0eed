"""Faults of a disk as verbs, keyed to a call, for the tests of anything that keeps checkpoints.

Pass a `FaultyDisk` wherever a `Disk` is taken. A fault strikes instead of the call it is keyed to (or before it, for
`kill_at` and `pause_at`), once; `require_struck` tells a test that it did.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.format.disk import Disk


@dataclass(frozen=True)
class DiskFault:
    """One fault; made by the verbs below.

    Attributes:
        verb: "kill", "pause", "fail" or "short".
        at: the number of the call (0: the first that the disk gets), or the name of a method (its first call).
        errno: for "fail".
    """

    verb: str
    at: int | str
    errno: int = 0


def kill_at(at: int | str) -> DiskFault:
    """The process kills itself (SIGKILL) before the call."""
    return DiskFault("kill", at)


def pause_at(at: int | str) -> DiskFault:
    """The process stops (SIGSTOP) before the call, until somebody sends SIGCONT."""
    return DiskFault("pause", at)


def fail_at(at: int | str, error: int) -> DiskFault:
    """The call fails with this errno and does nothing."""
    return DiskFault("fail", at, error)


def full_at(at: int | str) -> DiskFault:
    """The call fails because the disk is full (ENOSPC)."""
    return fail_at(at, errno.ENOSPC)


def short_write_at(at: int | str = "write_some") -> DiskFault:
    """The call, which must be to `write_some`, takes only half of what it is given, at least one byte."""
    return DiskFault("short", at)


class FaultyDisk(Disk):
    """A real disk with faults; used by one thread at a time.

    Args:
        *faults: what goes wrong, see the verbs of this module.

    Attributes:
        calls: the names of the methods that were called, in order; `write_some` counts beside the `write` it serves.
        struck: the faults that happened, in order.
    """

    def __init__(self, *faults: DiskFault) -> None:
        self._faults = list(faults)
        self.calls: list[str] = []
        self.struck: list[DiskFault] = []

    def require_struck(self) -> None:
        """Raises AssertionError if a fault has not happened: the test would prove nothing."""
        missing = [fault for fault in self._faults if fault not in self.struck]
        if missing:
            raise AssertionError(f"{missing} never happened; the calls were {self.calls}")

    def _reach(self, name: str, path: Path | None) -> DiskFault | None:
        number = len(self.calls)
        self.calls.append(name)
        fault = next((fault for fault in self._faults if fault.at in (number, name) and fault not in self.struck), None)
        if fault is None:
            return None
        self.struck.append(fault)
        if fault.verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.verb == "pause":
            # sent to this thread: it is the one that must not go on before the process has stopped
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if fault.verb == "fail" and path is None:
            raise OSError(fault.errno, os.strerror(fault.errno))  # explained by `write`, which it serves
        if fault.verb == "fail" and path is not None:
            with explained(f"{name.replace('_', ' ')} (a fault of the test)", path):
                raise OSError(fault.errno, os.strerror(fault.errno))
        if fault.verb == "short" and name != "write_some":
            raise AssertionError(f"short_write_at({fault.at!r}) is a call to {name}, not to write_some")
        return fault

    def create(self, path: Path) -> int:
        """See `Disk`, as all below."""
        self._reach("create", path)
        return super().create(path)

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:  # noqa: D102
        self._reach("allocate", path)
        super().allocate(descriptor, size_bytes, path)

    def store(self, memory: memoryview, begin: int, data: bytes) -> None:  # noqa: D102
        self._reach("store", Path("memory"))
        super().store(memory, begin, data)

    def write(self, descriptor: int, buffers: Sequence[memoryview], path: Path) -> None:  # noqa: D102
        self._reach("write", path)
        super().write(descriptor, buffers, path)

    def write_some(self, descriptor: int, buffer: memoryview) -> int:  # noqa: D102
        fault = self._reach("write_some", None)
        is_short = fault is not None and fault.verb == "short"
        return super().write_some(descriptor, buffer[: max(1, buffer.nbytes // 2)] if is_short else buffer)

    def write_at(self, descriptor: int, data: bytes, begin: int, path: Path) -> None:  # noqa: D102
        self._reach("write_at", path)
        super().write_at(descriptor, data, begin, path)

    def sync(self, descriptor: int, path: Path) -> None:  # noqa: D102
        self._reach("sync", path)
        super().sync(descriptor, path)

    def sync_folder(self, path: Path) -> None:  # noqa: D102
        self._reach("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:  # noqa: D102
        self._reach("rename", target)
        super().rename(source, target)

    def publish(self, source: Path, target: Path) -> None:  # noqa: D102
        self._reach("publish", target)
        super().publish(source, target)

    def remove(self, path: Path) -> None:  # noqa: D102
        self._reach("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:  # noqa: D102
        self._reach("remove_folder", path)
        super().remove_folder(path)

    def make_folder(self, path: Path) -> None:  # noqa: D102
        self._reach("make_folder", path)
        super().make_folder(path)
