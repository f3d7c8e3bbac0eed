"""When a process began, on the clock that the ledger counts by."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_started_ns(pid: int) -> int:
    """When a process began, in nanoseconds of `time.monotonic_ns`, to a kernel tick (10 ms); never later than now.

    Where the system does not tell (it has gone, or this is not Linux), now. See proc(5), /proc/pid/stat, field 22.
    """
    now_ns = time.monotonic_ns()
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now_ns
    return now_ns - max(0, age_ns)
