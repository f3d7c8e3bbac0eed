"""A job life after life on an instance whose time is limited: started, sent SIGTERM at its end, all of it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from torchelastic.foreign_json import decode_json
from torchelastic.launch.esi_lives import (
    Ending,
    Life,
    Verdict,
    exit_text,
    judge,
    parse_manager_state,
    parse_progress,
    what_next,
)
from torchelastic.lifetime.deadline import MLP_VARIABLE
from torchelastic.lifetime.progress import PROGRESS_VARIABLE, Steps
from torchelastic.lifetime.requeue import STOPPED_EARLY
from torchelastic.lifetime.sources.detection import GRACE_VARIABLE, TERMINATION_FILE_VARIABLE
from torchelastic.processes import dies_with_parent

#: Which life this is, counted from 1.
LIFE_VARIABLE = "TORCHELASTIC_LIFE"
#: velastic's file, and that of `torchelastic.lifetime.IterManager`.
MANAGER_FILE = "manager_state.json"
#: What ends the simulator, and the job with it, at once.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

_POLL_S = 0.05
#: How often orphans that have ended are waited for while the job runs: it reads the list of all processes of the host.
_REAP_EVERY_S = 5.0
#: How long processes may take to be gone after SIGKILL.
_KILL_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20


class SurvivorsError(RuntimeError):
    """Processes are still there after SIGKILL: they belong to somebody else, or the kernel holds them; names them."""


class Interrupted(BaseException):
    """A signal ends the simulator; raised on the main thread, once.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Order:
    """What is simulated.

    Attributes:
        command: for the shell.
        timeout_s: seconds of a life, up to SIGTERM.
        grace_s: seconds from SIGTERM to SIGKILL.
        pause_s: seconds from the end of a life to the next.
        max_restarts: as of `what_next`.
        requeue_codes: as of `judge`.
        velastic_dir: where the job has velastic's `manager_state.json`, if it has one.
    """

    command: str
    timeout_s: float
    grace_s: float = 30.0
    pause_s: float = 0.0
    max_restarts: int | None = None
    requeue_codes: tuple[int, ...] = (STOPPED_EARLY,)
    velastic_dir: Path = Path(".velastic")


class Simulation:
    """Life after life. On the main thread; children that this process has already are left alone.

    Args:
        order: what is simulated.
        folder: for the files that the job is told of.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self._order = order
        self._spare = frozenset(child.pid for child in psutil.Process().children())
        self._termination_path, self._progress_path = folder / "termination-time", folder / "progress.json"
        self._job: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._reap_s = 0.0

    def run(self, note: Callable[[list[Life], Verdict], None]) -> Verdict:
        """All lives; nothing of them is left when this returns or raises.

        Args:
            note: called with the lives and the verdict after each of them, and when nothing is left.

        Raises:
            SurvivorsError: something could not be ended.
            OSError: the job could not be started, or one of our files not be written.
        """
        lives: list[Life] = []
        _adopt_orphans(True)
        try:
            verdict = Verdict(True, 0, "")
            while verdict.goes_on:
                if lives:
                    time.sleep(self._order.pause_s)
                lives.append(self._live(len(lives) + 1))
                verdict = what_next(lives, self._order.max_restarts)
                note(lives, verdict)
        except Interrupted as interrupted:
            whole = f"{len(lives)} whole {'life' if len(lives) == 1 else 'lives'}"
            reason = f"interrupted by {exit_text(-interrupted.number)} after {whole}"
            verdict = Verdict(False, 128 + interrupted.number, reason)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # nothing interrupts this
            self._end_all()
            _adopt_orphans(False)
        note(lives, verdict)
        return verdict

    def _live(self, number: int) -> Life:
        """One life, from its start until no process of it is left."""
        order, self._number = self._order, number
        reported = Reported(self._progress_path, order.velastic_dir / MANAGER_FILE)
        end_unix_s, began_s = time.time() + order.timeout_s, time.monotonic()
        self._termination_path.write_text(f"{end_unix_s:.3f}\n")
        self._say(f"starts, until {datetime.fromtimestamp(end_unix_s).astimezone():%Y-%m-%d %H:%M:%S %z}")
        job = self._job = subprocess.Popen(
            dies_with_parent(["/bin/sh", "-c", order.command]),
            env={GRACE_VARIABLE: f"{order.grace_s:g}", **os.environ}  # what the user has said stays
            | {
                MLP_VARIABLE: f"{end_unix_s:.3f}",
                TERMINATION_FILE_VARIABLE: str(self._termination_path),
                PROGRESS_VARIABLE: str(self._progress_path),
                LIFE_VARIABLE: str(number),
            },
            stdin=subprocess.DEVNULL,  # an instance has no keyboard
            start_new_session=True,
        )
        deadline_s = began_s + order.timeout_s
        timed_out = not self._holds_by(deadline_s, reported, lambda: job.poll() is not None)
        given_up_s = 0.0 if timed_out else max(0.0, deadline_s - time.monotonic())
        if timed_out:
            self._say(f"time is over: SIGTERM to process group {job.pid}")
            try:
                os.killpg(job.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass  # it has ended by itself this moment
            # children of the command too have the grace: a shell goes first
            self._holds_by(deadline_s + order.grace_s, reported, lambda: not self._descendants())
        killed = self._end_all()
        reported.read()
        ending = Ending(job.wait(), time.monotonic() - began_s, given_up_s, timed_out, len(killed))
        life = Life(judge(ending, reported.steps, order.requeue_codes), ending, reported.steps)
        self._say(str(life))
        if reported.fault:
            self._say(f"its progress file is left out: {reported.fault}")
        return life

    def _holds_by(self, deadline_s: float, reported: Reported, condition: Callable[[], bool]) -> bool:
        """Whether something comes true before that moment. Reads what the job reports meanwhile."""
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                return False
            reported.read()
            if time.monotonic() > self._reap_s:
                self._descendants()
                self._reap_s = time.monotonic() + _REAP_EVERY_S
            time.sleep(min(_POLL_S, left_s))
        return True

    def _descendants(self) -> list[psutil.Process]:
        """What is left of a life, waited for what has ended of it."""
        while True:
            children = [child for child in psutil.Process().children() if child.pid not in self._spare]
            if not any(self._has_ended(child.pid) for child in children):
                break  # else its own children are ours now
        found = []
        for child in children:
            try:
                found += [child, *child.children(recursive=True)]
            except psutil.NoSuchProcess:
                found.append(child)
        return found

    def _has_ended(self, pid: int) -> bool:
        if self._job is not None and pid == self._job.pid:
            return self._job.poll() is not None
        try:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:  # whoever started us ignores SIGCHLD
            return True

    def _end_all(self) -> set[int]:
        """SIGKILL to every descendant, again and again until none is left: meanwhile they may have started others.

        Returns the pids of those that were alive. Raises SurvivorsError.
        """
        killed: set[int] = set()
        give_up_s = time.monotonic() + _KILL_TIMEOUT_S
        while present := self._descendants():
            for process in present:
                if _kill(process):
                    killed.add(process.pid)
            if time.monotonic() > give_up_s:
                pids = ", ".join(str(process.pid) for process in present)
                raise SurvivorsError(
                    f"still there {_KILL_TIMEOUT_S:g} s after SIGKILL: {pids}. They belong to another user, or the "
                    "kernel waits for a device: end them by hand before the job is started again"
                )
            time.sleep(_POLL_S / 2)
        return killed

    def _say(self, text: str) -> None:
        _say(f"life {self._number}: {text}")


class Reported:
    """What a job reports in one life; what was last readable counts: a killed job may leave half a line.

    Args:
        progress_path: of our file; what a life before has left there is removed.
        manager_path: of velastic's, which is only read, and only if it was written in this life.

    Attributes:
        fault: what is wrong with our file; "" if nothing is.
    """

    def __init__(self, progress_path: Path, manager_path: Path) -> None:
        self._progress_path, self._manager_path = progress_path, manager_path
        self._manager_before = _stamp(manager_path)
        self._progress = Steps()
        self._managers_step: int | None = None
        self.fault = ""
        progress_path.unlink(missing_ok=True)

    def read(self) -> None:
        """Read both files."""
        try:
            self._progress, self.fault = parse_progress(_read(self._progress_path)), ""
        except FileNotFoundError:
            pass  # the job reports nothing, or nothing yet
        except (OSError, ValueError, RecursionError) as error:
            self.fault = str(error)
        if _stamp(self._manager_path) not in (None, self._manager_before):
            try:
                self._managers_step = parse_manager_state(_read(self._manager_path))
            except (OSError, ValueError, RecursionError):
                pass  # velastic writes it in place, so half of it is nothing unusual

    @property
    def steps(self) -> Steps:
        """Of this life. velastic's total is left out: it does not tell whether an exit with 0 was the end."""
        if self._progress.committed_step is not None:
            return self._progress
        return replace(self._progress, committed_step=self._managers_step)


@contextmanager
def signals_raise() -> Iterator[None]:
    """The first of `SIGNALS` raises `Interrupted`; the next ones, and those ignored before (nohup), change nothing."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _adopt_orphans(does: bool) -> None:
    """Whatever this process's descendants leave behind becomes its child. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _kill(process: psutil.Process) -> bool:
    """Whether it was alive. Also what looks dead gets the signal: a first thread may end before the others."""
    try:
        was_alive = bool(process.status() != psutil.STATUS_ZOMBIE)
        process.kill()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return was_alive


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return decode_json(path.name, file.read(_MAX_BYTES + 1), most_bytes=_MAX_BYTES)


def _say(text: str) -> None:
    print(f"simulate-esi: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for a person, beside the job's output
