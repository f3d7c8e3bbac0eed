"""One place for a worker on this host, and the processes in it."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from torchelastic.agent.causes import FailedWorker, begins_traceback, failed_at_s
from torchelastic.agent.signals import handlers, signal_group
from torchelastic.agent.worker_log import WorkerLog
from torchelastic.log_lines import NOWHERE, Position
from torchelastic.processes.family import below
from torchelastic.processes.identity import Process

#: Lines of standard error that are kept to be shown last when a worker has failed.
TAIL_LINES = 60


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
        computes_wrong: a process of it was found to, and how; empty: none was.
        has_finished: that process has said that it has finished; once it has ended: and the run was closed then.
        position: where its last process stood when it ended, if the agent has said so.
        traceback_s: when its present process last began a traceback, in Unix seconds.
        ended_s: when its last process ended.
        tail: the last lines of its standard error.
        has_stand_in: a member of the run stands in for its script, see `plain_member`.
        log_file: takes the output of its last process; None: nothing does.
        own: what its processes have for themselves.
        trainers: who has spoken to the agent for its present process: that itself, or, where that is a wrapper script
            (`--no-python run.sh`), what it has started.
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
    computes_wrong: str = ""
    has_finished: bool = False
    position: Position = NOWHERE
    traceback_s: float | None = None
    ended_s: float = 0.0
    has_stand_in: bool = False
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=TAIL_LINES))
    log_file: WorkerLog | None = None
    own: Own = Own()
    trainers: set[Process] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs here and nothing will."""
        return self.process is None and (self.gave_up or self.leaves or self.exit_code == 0)

    def has(self, pid: int) -> bool:
        """Whether this is its present process, or one that speaks to the agent for it."""
        is_own = self.process is not None and self.process.pid == pid
        return is_own or any(trainer.pid == pid for trainer in self.trainers)

    @property
    def speaker(self) -> int | None:
        """The process to speak to: its own, or where that is a wrapper the one that trains. None: it has none."""
        if self.process is None:
            return None
        others = [trainer.pid for trainer in self.trainers if not trainer.has_ended]
        return self.process.pid if self.process.pid in others else next(iter(others), self.process.pid)

    def is_spoken_for_by(self, pid: int) -> None:
        """A process has spoken to the agent in its place: it is remembered if this one has started it, or is it."""
        if self.process is not None and (self.has(pid) or pid in below(self.process.pid)):
            self.trainers.add(Process.of(pid))

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
        """Send a signal to its present process, if there is one, and if it is for all, to what that has started.

        One that is not for all goes past a wrapper script to what handles it.
        """
        if self.process is None:
            return
        pid = self.process.pid  # not reaped while it is the present one, so the number is its own
        if is_for_all:
            signal_group(pid, number)
            self.signal_trainers_elsewhere(pid, number)
        else:
            for each in handlers(pid, number) or [pid]:
                with suppress(ProcessLookupError):
                    os.kill(each, number)

    def signal_trainers_elsewhere(self, group: int, number: int) -> None:
        """Send a signal to those that train for it and are not in this process group: some wrappers make others."""
        for trainer in self.trainers:
            with suppress(ProcessLookupError):
                if os.getpgid(trainer.pid) != group:
                    trainer.signal(number)

    def end_what_it_left(self, group: int, exit_code: int | None) -> None:
        """Its process has ended and is not reaped yet: with 0, what it has started goes on, as under torchrun.

        Not what trains in its place: without its wrapper script that is no worker any more. After a failure all ends.
        """
        if exit_code == 0:
            for trainer in () if self.has_finished else self.trainers:
                trainer.signal(signal.SIGKILL)
        else:
            signal_group(group, signal.SIGKILL)
            self.signal_trainers_elsewhere(group, signal.SIGKILL)

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


def exit_code_of(pid: int) -> int | None:
    """How a child of this process ended, as subprocess has it, without reaping it; None: it lives, or is no child."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
