"""One place for a worker on this host, and the signals to the processes in it."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchelastic.agent.causes import FailedWorker, begins_traceback, failed_at_s
from torchelastic.agent.worker_log import WorkerLog
from torchelastic.log_lines import NOWHERE, Position

log = logging.getLogger(__name__)

#: Lines of standard error that are kept to be shown last when a worker has failed.
TAIL_LINES = 60
#: Schedulers send them to every process of a job (`sbatch --signal`), as a notice for the workers; by default they
#: would end the launcher, and with it everything.
NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: Schedulers send these to every process of a job, too (`scancel --signal=QUIT`). The launcher has its workers leave in
#: order at them (SIGHUP says that the terminal was closed, SIGQUIT is Ctrl-\), so a worker ignores them.
ORDERLY_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Own:
    """What one worker has for itself alone.

    Attributes:
        variables: of its environment.
        cpus: that it runs on; empty: those of the launcher.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: frozenset[int] = frozenset()


@dataclass
class Worker:
    """One place on this host; the processes in it come and go.

    Attributes:
        local_rank: its number on this host.
        restarts: how often its process has been started again.
        process: the present one, None between two.
        exit_code: of the last one that ended, as subprocess has it (negative: a signal).
        gave_up: it has failed and will not be started again.
        leaves: it was asked to leave the run, or stopped before a deadline: however it ends, it has not failed and will
            not be started again.
        came_late: the run was finished while it was started again, so it leaves, with whatever exit code.
        is_hung: its present process is being ended because it hung.
        was_idle: it was ended because nobody needed it any more, and it did not end by itself.
        started_s: when its present process was started, by the monotonic clock.
        asked_s: when that process first asked for a group; None: it has not.
        fails_for_good: that process has said that its error would come again in another one.
        has_finished: that process has said that it has finished; once it has ended: and the run was closed then.
        position: where its last process stood when it ended, if the agent has said so.
        traceback_s: when its present process last began a traceback, in Unix seconds.
        ended_s: when its last process ended.
        tail: the last lines of its standard error.
        has_stand_in: a member of the run stands in for its script, see `plain_member`.
        log_file: takes the output of its last process; None: nothing does.
        own: what its processes have for themselves.
    """

    local_rank: int
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    gave_up: bool = False
    leaves: bool = False
    came_late: bool = False
    is_hung: bool = False
    was_idle: bool = False
    started_s: float = 0.0
    asked_s: float | None = None
    fails_for_good: bool = False
    has_finished: bool = False
    position: Position = NOWHERE
    traceback_s: float | None = None
    ended_s: float = 0.0
    has_stand_in: bool = False
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=TAIL_LINES))
    log_file: WorkerLog | None = None
    own: Own = Own()

    @property
    def is_over(self) -> bool:
        """Whether nothing runs here and nothing will."""
        return self.process is None and (self.gave_up or self.leaves or self.exit_code == 0)

    def on_line(self, line: str) -> None:
        """A line of its standard error."""
        self.tail.append(line)
        if begins_traceback(line):
            self.traceback_s = time.time()

    def failed(self) -> FailedWorker:
        """What its last process has failed of."""
        return FailedWorker(
            at_s=failed_at_s(self.ended_s, self.exit_code, self.traceback_s),
            worker=self.local_rank,
            exit_code=self.exit_code,
            position=self.position,
            restarts=self.restarts,
            gave_up=self.gave_up,
            is_hang=self.is_hung,
            had_finished=self.has_finished,
            lines=tuple(self.tail),
            log="" if self.log_file is None else str(self.log_file.path or ""),
        )

    def signal(self, number: int, *, is_for_all: bool = True) -> None:
        """Send a signal to its present process, if there is one, and if it is for all, to what that has started."""
        if self.process is not None:
            signal_process = signal_group if is_for_all else os.kill
            signal_process(self.process.pid, number)  # not reaped while it is the present one, so the number is its own

    async def end(self, process: subprocess.Popen[bytes], *signals: tuple[float, int]) -> None:
        """Send each signal so many seconds after the one before, to this process of it and never to its successor."""
        for after_s, number in signals:
            await asyncio.sleep(after_s)
            if self.process is not process:
                return
            self.signal(number)


def worker_stdin(nproc: int) -> int | None:
    """What `subprocess.Popen` takes as `stdin`; None: the terminal of this launcher.

    A single worker of a launcher in the foreground of a terminal gets that: `breakpoint()` and `input()` work. Several
    would read each other's lines. The kernel stops no reader for being in the background of a terminal that is not its
    session's: so a worker, which has a session of its own, may read, and Ctrl-C stays the launcher's.

    Args:
        nproc: how many workers the launcher has.
    """
    return None if nproc == 1 and _is_in_foreground() else subprocess.DEVNULL


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, not that of this session, or closed
        return False


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
