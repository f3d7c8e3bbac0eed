"""Background work gives way to training: nice values and I/O classes, by system calls and never by a command."""

from __future__ import annotations

import logging
import os
import sys

import psutil

log = logging.getLogger(__name__)


def check_priorities(cpu_priority: int, io_priority: int | None) -> None:
    """Raise ValueError unless these are a nice value (-20 to 19) and an I/O class (0 to 3, or None)."""
    if not -20 <= cpu_priority <= 19:
        raise ValueError(f"cpu_priority is {cpu_priority}: give a nice value from -20 to 19 (19 gives way most)")
    if io_priority is not None and io_priority not in range(4):
        raise ValueError(f"io_priority is {io_priority}: give an ionice class (1 real-time, 2 best effort, 3 idle)")


def lower_thread_priority(cpu_priority: int) -> None:
    """Raise the nice value of the calling thread, and of those it starts, to `cpu_priority`; never lowers it.

    Linux has a nice value per thread. Elsewhere it is that of the whole process, so nothing is done there.
    """
    if sys.platform != "linux":
        return
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) < cpu_priority:
            os.setpriority(os.PRIO_PROCESS, 0, cpu_priority)
    except OSError as error:
        log.warning("could not set the nice value of the checkpoint worker to %d: %s", cpu_priority, error)


def lower_process_priority(cpu_priority: int, io_priority: int | None) -> None:
    """Do the same for the calling process, on its main thread before it starts others; and set its I/O class."""
    if sys.platform == "linux":
        lower_thread_priority(cpu_priority)
    else:
        os.nice(max(0, cpu_priority - os.nice(0)))
    if io_priority is None:
        return
    try:
        if sys.platform == "linux":
            psutil.Process().ionice(io_priority)
    except (psutil.Error, OSError, ValueError) as error:
        log.warning("could not set the I/O class of the checkpoint worker to %d: %s", io_priority, error)
