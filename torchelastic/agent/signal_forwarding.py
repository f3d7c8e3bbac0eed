"""SIGUSR1 and SIGUSR2 to a launcher: schedulers send them to every process of a job (`sbatch --signal`), as a notice.

They are meant for the workers; by default they would end the launcher, and with it everything.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def catches(status: str, number: int) -> bool:
    r"""Whether a process has a handler for a signal, by the text of its `/proc/PID/status` (proc(5), SigCgt).

    >>> catches("Name:\tpython\nSigCgt:\t0000000000000200\n", signal.SIGUSR1)
    True
    """
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def forward(number: signal.Signals, pids: Iterable[int]) -> list[int]:
    """Send a signal to those of the processes that handle it, for it would end the others; returns whom."""
    told = []
    for pid in pids:
        try:
            if catches(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), number):
                os.kill(pid, number)
                told.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    log.warning("%s came: passed on to %d worker(s) that handle it", number.name, len(told))
    return told
