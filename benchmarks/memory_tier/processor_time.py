"""The processor time of a process and of all that it has started."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED


def family_cpu_s() -> float:
    """Seconds of processor time of this process, its children that have ended, and its descendants that live."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_s, descendants(os.getpid())))


def _cpu_s(process_id: int) -> float:
    """To the nanosecond, which /proc does not give: see clock_getcpuclockid(3), whose numbers the kernel defines."""
    try:
        return time.clock_gettime((~process_id << 3) | _PROCESS_CLOCK)
    except OSError:
        return 0.0  # it has ended meanwhile


def descendants(process_id: int) -> list[int]:
    """The ids of the processes that it has started, and they."""
    found: list[int] = []
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            ids = [int(each) for each in children.read_text().split()]
        except OSError:
            continue  # that thread has ended
        for each in ids:
            found += [each, *descendants(each)]
    return found
