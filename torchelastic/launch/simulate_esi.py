"""`torchelastic simulate-esi`: a job on instances whose time is limited, attempt after attempt, on this host.

Each attempt is started, sent SIGTERM at its end, and all of it is ended before the next; `esi_lives` judges it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType

import psutil

from torchelastic.foreign_json import RecordError, converted, decode_json
from torchelastic.launch.esi_lives import Attempt, Verdict, exit_text, report_document, table, what_next
from torchelastic.lifetime.deadline import MLP_VARIABLE
from torchelastic.lifetime.grace import GRACE_VARIABLE
from torchelastic.lifetime.progress_file import PROGRESS_VARIABLE, Steps
from torchelastic.lifetime.sources.detection import TERMINATION_FILE_VARIABLE
from torchelastic.processes import dies_with_parent
from torchelastic.processes.exit_codes import STOPPED_EARLY
from torchelastic.text import counted
from torchelastic.usage import CommandError, UsageError

#: Which attempt this is, counted from 1.
LIFE_VARIABLE = "TORCHELASTIC_LIFE"
#: What ends the simulator, and the job with it, at once.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

_POLL_S = 0.05
_LONGEST_S = 365 * 86_400.0
#: How long processes may take to be gone after SIGKILL.
_KILL_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20


def simulate_esi(options: argparse.Namespace) -> int:
    """Run the attempts. Exit code 0 if the job has finished, 1 if not, 128 + N if signal N has ended it."""
    _check(options)
    path = options.report
    if sys.platform != "linux":
        raise UsageError("it needs Linux, whose kernel hands it the processes that a job leaves behind")
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
        raise UsageError(f"--report {path}: give a file in a folder that exists and may be written to")
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic-esi-") as folder:
            attempts, verdict = Simulation(options, Path(folder)).run()
    except OSError as error:
        raise CommandError(str(error)) from error
    said = {"command": options.cmd, "timeout_s": options.timeout, "grace_s": options.grace}
    document = said | report_document(attempts, verdict)
    _say(verdict.reason, above=table(document))
    if options.json:
        print(json.dumps(document, allow_nan=False), flush=True)  # noqa: T201 - asked for
    if path is not None:
        try:
            path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise CommandError(f"--report {path} cannot be written: {error.strerror}") from error
    return verdict.exit_code


def _check(options: argparse.Namespace) -> None:
    """Raises UsageError: an option is invalid."""
    if not options.cmd.strip():
        raise UsageError("--cmd is empty: give the command that starts the job")
    for name, least in (("timeout", "above 0"), ("grace", "0 or more"), ("pause", "0 or more")):
        seconds = getattr(options, name)
        if not 0.0 <= seconds <= _LONGEST_S or (seconds == 0.0 and name == "timeout"):
            raise UsageError(f"--{name} {seconds:g}: give seconds, {least}, and at most {_LONGEST_S:.0f} (a year)")
    if not all(1 <= code <= 255 for code in options.requeue_code or ()):
        raise UsageError("--requeue-code: give an exit code from 1 to 255")
    if options.max_restarts is not None and options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: give a number from 0 on")


class Simulation:
    """Attempt after attempt. On the main thread of a process of its own: its signals are handled, its orphans adopted.

    Args:
        options: of the command line, which are checked.
        folder: for the files that the job reads and writes.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._termination_path, self._progress_path = folder / "termination-time", folder / "progress.json"
        self._job: subprocess.Popen[bytes] | None = None
        self._number = self._signal = 0

    def run(self) -> tuple[list[Attempt], Verdict]:
        """All attempts; nothing of them is left when this returns or raises.

        Raises:
            CommandError: processes are still there after SIGKILL; names them.
            OSError: the job could not be started, or the file with the end of its time not be written.
        """
        attempts: list[Attempt] = []
        _adopt_orphans()
        try:
            self._let_signals_interrupt()
            verdict = Verdict(True, 0, "")
            while verdict.goes_on:
                if attempts:
                    time.sleep(self._options.pause)
                attempts.append(self._live(len(attempts) + 1))
                verdict = what_next(attempts, self._options.max_restarts)
        except KeyboardInterrupt:
            whole = counted(len(attempts), "whole attempt", "whole attempts")
            reason = f"interrupted by {exit_text(-self._signal)} after {whole}"
            verdict = Verdict(False, 128 + self._signal, reason)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # nothing interrupts this
            self._end_all()
        return attempts, verdict

    def _live(self, number: int) -> Attempt:
        """One attempt, from its start until no process of it is left."""
        options, self._number = self._options, number
        reported = Reported(self._progress_path)
        end_unix_s, began_s = time.time() + options.timeout, time.monotonic()
        self._termination_path.write_text(f"{end_unix_s:.3f}\n")
        self._say(f"starts, until {datetime.fromtimestamp(end_unix_s).astimezone():%Y-%m-%d %H:%M:%S %z}")
        job = self._job = subprocess.Popen(
            dies_with_parent(["/bin/sh", "-c", options.cmd]),
            env={GRACE_VARIABLE: f"{options.grace:g}", **os.environ}  # what the user has said stays
            | {
                MLP_VARIABLE: f"{end_unix_s:.3f}",
                TERMINATION_FILE_VARIABLE: str(self._termination_path),
                PROGRESS_VARIABLE: str(self._progress_path),
                LIFE_VARIABLE: str(number),
            },
            stdin=subprocess.DEVNULL,  # an instance has no keyboard
            start_new_session=True,
        )
        deadline_s = began_s + options.timeout
        timed_out = not self._holds_by(deadline_s, reported, self._has_ended)
        left_s = 0.0 if timed_out else max(0.0, deadline_s - time.monotonic())
        if timed_out:
            self._say(f"time is over: SIGTERM to process group {job.pid}")
            with suppress(ProcessLookupError):  # it has ended by itself this moment
                os.killpg(job.pid, signal.SIGTERM)
            # children of the command too have the grace: a shell goes first
            self._holds_by(deadline_s + options.grace, reported, lambda: not self._left())
        killed = self._end_all()
        reported.read()
        codes = tuple(options.requeue_code or (STOPPED_EARLY,))
        used_s = time.monotonic() - began_s
        attempt = Attempt(job.returncode, used_s, left_s, timed_out, len(killed), reported.steps, codes)
        self._say(str(attempt))
        if reported.fault:
            self._say(f"its progress file is skipped: {reported.fault}")
        return attempt

    def _holds_by(self, deadline_s: float, reported: Reported, condition: Callable[[], bool]) -> bool:
        """Whether something comes true before that moment. Reads what the job reports meanwhile."""
        while not condition():
            if self._signal:  # what the handler raised is lost where it met a finalizer
                raise KeyboardInterrupt
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                return False
            reported.read()
            time.sleep(min(_POLL_S, left_s))
        return True

    def _has_ended(self) -> bool:
        """Whether the command has; waited for whatever has ended, whose own children are ours then."""
        job = self._job
        with suppress(ChildProcessError):  # there is none left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if job is not None and ended[0] == job.pid:
                    job.returncode = os.waitstatus_to_exitcode(ended[1])
        return job is None or job.returncode is not None

    def _left(self) -> list[psutil.Process]:
        """What is left of an attempt."""
        self._has_ended()
        return psutil.Process().children(recursive=True)

    def _end_all(self) -> set[int]:
        """SIGKILL to every descendant, again and again until none is left: meanwhile they may have started others.

        Returns the pids of those that were alive. Raises CommandError.
        """
        killed: set[int] = set()
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while present := self._left():
            for process in present:
                if _kill(process):
                    killed.add(process.pid)
            if time.monotonic() > deadline_s:
                pids = ", ".join(str(process.pid) for process in present)
                raise CommandError(
                    f"still there {_KILL_TIMEOUT_S:g} s after SIGKILL: {pids}. They belong to another user, or the "
                    "kernel waits for a device: end them by hand before the job is started again"
                )
            time.sleep(_POLL_S / 2)
        return killed

    def _let_signals_interrupt(self) -> None:
        """The first of `SIGNALS` interrupts; the next ones, and those ignored before (nohup), change nothing."""

        def interrupt(number: int, _frame: FrameType | None) -> None:
            for one in SIGNALS:
                signal.signal(one, signal.SIG_IGN)
            self._signal = number
            raise KeyboardInterrupt

        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started us may ignore it: no exit code would be known

    def _say(self, text: str) -> None:
        _say(f"attempt {self._number}: {text}")


class Reported:
    """What a job reports in one attempt; what was last readable counts: a killed job may leave half a line.

    Args:
        path: of the file; what an attempt before has left there is removed.

    Attributes:
        steps: of this attempt.
        fault: what is wrong with the file; "" if nothing is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps, self.fault = Steps(), ""
        path.unlink(missing_ok=True)

    def read(self) -> None:
        """Read the file."""
        try:
            with self._path.open("rb") as file:
                document = decode_json(self._path.name, file.read(_MAX_BYTES + 1), most_bytes=_MAX_BYTES)
            self.steps, self.fault = converted(self._path.name, document, Steps), ""
        except FileNotFoundError:
            pass  # the job reports nothing, or nothing yet
        except (OSError, RecordError) as error:
            self.fault = str(error)


def _adopt_orphans() -> None:
    """Whatever this process's descendants leave behind becomes its child. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _kill(process: psutil.Process) -> bool:
    """Whether it was alive. Also what looks dead gets the signal: a first thread may end before the others."""
    try:
        was_alive = bool(process.status() != psutil.STATUS_ZOMBIE)
        process.kill()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return was_alive


def _say(text: str, above: str = "") -> None:
    lines = [above] if above else []
    print(*lines, f"simulate-esi: {text}", sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - for a person, beside the job's output
