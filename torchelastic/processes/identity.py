"""Which process one is, so that another of its host can tell later whether it still lives; and the host's clock."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from torchelastic.processes.family import stat_fields

#: No process has a larger number: a pid is a C int.
MAX_PID = 2**31 - 1
_PROC = Path("/proc")
# macOS has no such clock under this name; there, a sleep of the host is not counted
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Process:
    """A process among all that this host has run since its boot.

    Attributes:
        pid: as seen in this pid namespace.
        started_ticks: the moment of its start, in the kernel's ticks since the boot; -1: it was not found.
    """

    pid: Annotated[int, Meta(ge=0, le=MAX_PID)]
    started_ticks: Annotated[int, Meta(ge=-1, le=2**63 - 1)]

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now."""
        return cls(pid, _started_ticks(pid))

    @property
    def has_ended(self) -> bool:
        """Whether it certainly does not run any more; False wherever that cannot be known."""
        if self.started_ticks < 0 or self.pid <= 0:
            return False
        now_ticks = _started_ticks(self.pid)
        # /proc may be mounted so that it hides the processes of other users (hidepid)
        return now_ticks != self.started_ticks and (now_ticks >= 0 or not _is_hidden(self.pid))

    def signal(self, number: int) -> None:
        """Send it a signal, and never to another process that has got its number; nothing if it has ended."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if not self.has_ended:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def boot_time_s() -> float:
    """Seconds since the host was started, time asleep included; never goes backwards, the same for all its processes.

    >>> before = boot_time_s()
    >>> boot_time_s() >= before
    True
    """
    return time.clock_gettime(_CLOCK)


def boot_id() -> str:
    """Names this boot of the kernel, the same in all its containers; empty where the system does not tell."""
    return _read(_PROC / "sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal for all processes on one host, also in containers; its name where there is no Linux."""
    return boot_id() or socket.gethostname()


def this_place() -> dict[str, str]:
    """Boot and pid namespace: only of processes with the same two can anything be said here.

    Where the system does not tell (not Linux), `boot` is empty and nothing can be said of any.
    """
    namespace = _PROC / "self/ns/pid"
    return {
        "boot": boot_id(),
        "namespace": str(namespace.readlink()) if namespace.exists() else "",
    }


def is_this_place(other: Mapping[str, str]) -> bool:
    """Whether processes of that place can be seen here.

    False for another boot (hosts with one name are not always one host), and for another container.
    """
    here = this_place()
    return bool(here["boot"]) and here.items() <= other.items()


def _is_hidden(pid: int) -> bool:
    """Whether there is a process with that pid of which /proc shows nothing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # ours, so it would be shown: a zombie


def _started_ticks(pid: int) -> int:
    """When a process was started, in the kernel's ticks since the boot: unlike seconds of the day they are never set.

    -1 where there is no such process, or only a zombie. See proc(5), /proc/pid/stat: the 22nd field, the 2nd one being
    in parentheses.
    """
    fields = stat_fields(pid)
    is_a_zombie = fields[:1] == ["Z"]
    return int(fields[19]) if len(fields) > 19 and not is_a_zombie else -1


def process_started_ns(pid: int) -> int:
    """When a process began, in nanoseconds of `time.monotonic_ns`, to a kernel tick (10 ms); never later than now.

    Where the system does not show it (it has gone, or this is not Linux), now.
    """
    now_ns = time.monotonic_ns()
    try:
        ticks = int(stat_fields(pid)[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now_ns
    return now_ns - max(0, age_ns)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
