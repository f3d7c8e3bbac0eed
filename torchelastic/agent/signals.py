"""Signals: those that schedulers send to every process of a job, and those that the launcher sends to its workers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torchelastic.processes.family import nearest

log = logging.getLogger(__name__)

#: Schedulers send them to every process of a job (`sbatch --signal`), as a notice for the workers; by default they
#: would end the launcher, and with it everything.
NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: Schedulers send these to every process of a job, too (`scancel --signal=QUIT`). The launcher has its workers leave in
#: order at them (SIGHUP says that the terminal was closed, SIGQUIT is Ctrl-\), so a worker ignores them.
ORDERLY_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a worker's process and to what it has started, by the process's number."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # it has ended by itself


def catches(status: str, number: int) -> bool:
    r"""Whether a process has a handler for a signal, by the text of its `/proc/PID/status` (proc(5), SigCgt).

    >>> catches("Name:\tpython\nSigCgt:\t0000000000000200\n", signal.SIGUSR1)
    True
    """
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def handlers(pid: int, number: int) -> list[int]:
    """Who handles a signal, of a process and what it has started: itself, or, past a wrapper script, the next ones."""
    return nearest(pid, lambda each: catches(Path(f"/proc/{each}/status").read_text(encoding="utf-8"), number))


def forward(number: signal.Signals, pids: Iterable[int]) -> list[int]:
    """Send a signal to those of the processes that handle it, for it would end the others; returns whom.

    Where one is a wrapper script that does not handle it, it goes to what that has started.
    """
    told = []
    for pid in pids:
        for each in handlers(pid, number):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(each, number)
                told.append(each)
    log.warning("%s came: passed on to %d worker(s) that handle it", number.name, len(told))
    return told
