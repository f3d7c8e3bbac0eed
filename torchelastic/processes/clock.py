"""A clock that all processes of one host share, and that goes on while the host sleeps."""

from __future__ import annotations

import time

# macOS has no such clock under this name; there, a sleep of the host is not counted
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time_s() -> float:
    """Seconds since the host was started, time asleep included; never goes backwards, the same for all its processes.

    >>> before = boot_time_s()
    >>> boot_time_s() >= before
    True
    """
    return time.clock_gettime(_CLOCK)
