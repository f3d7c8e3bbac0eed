"""SLURM: the end of the job, from `SLURM_JOB_END_TIME` at once and from `squeue` periodically, as it may be moved.

From SLURM's manual pages: sbatch(1) (`SLURM_JOB_END_TIME`, Unix seconds, since 23.02), squeue(1) (`%A` job id, a value
of its own for each element of an array; `%e` end of the job; `%T` state; `SLURM_TIME_FORMAT`, a format of strftime(3)).
The end of a preempted job is moved to the end of its grace, and `scontrol update` moves it both ways. A cancelled job
is COMPLETING and ends at present, though its processes have KillWait seconds left, which SIGTERM announces.
"""

from __future__ import annotations

import logging
import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from torchelastic.lifetime.deadline import DeadlineAt, deadline_in_variable
from torchelastic.lifetime.sources.notice import InvalidAnswerError, Notice, Notices

log = logging.getLogger(__name__)

END_VARIABLE = "SLURM_JOB_END_TIME"
JOB_VARIABLE = "SLURM_JOB_ID"
#: The controller may be busy; a squeue that takes longer is ended.
SQUEUE_TIMEOUT_S = 10.0
#: Least seconds between two polls of all processes of the job together,
_LEAST_INTERVAL_S = 1.0
#: and of one process, while the end is far and near: it may have been moved.
_INTERVAL_S, _INTERVAL_NEAR_S = 60.0, 10.0
#: When all processes are to poll soon, they spread over this much per process.
_SPREAD_S = 0.01
_NO_END = ("N/A", "NONE", "UNKNOWN", "INVALID")

#: Runs a command: its words, environment variables to add, seconds. Returns what it prints. Raises SlurmCommandError.
Runner = Callable[[Sequence[str], Mapping[str, str], float], str]


class SlurmCommandError(Exception):
    """A command could not be run, failed, or did not end in time."""


class NoCommandError(SlurmCommandError):
    """There is no such command here."""


def run_command(command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str:
    """Run a command, with more environment variables, and return its output. See `Runner`.

    Raises:
        NoCommandError: it is not installed here.
        SlurmCommandError: it failed, or was killed after `timeout_s`.
    """
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except FileNotFoundError:
        raise NoCommandError(f"{command[0]} is not installed here") from None
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise SlurmCommandError(str(error)) from None
    if done.returncode:
        raise SlurmCommandError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def squeue_command(job_id: str) -> list[str]:
    """The command that prints id, end and state of a job; for the first element of an array also of the others."""
    return ["squeue", "--noheader", "--jobs", job_id, "--format", "%A %e %T"]


def is_being_ended(output: str, job_id: str) -> bool:
    """Whether only the last processes of the job are left (`squeue_command`): its end is no longer theirs."""
    return any(
        words[0] == job_id and words[2:] == ["COMPLETING"] for words in map(str.split, output.splitlines()) if words
    )


def parse_end_time(output: str, job_id: str) -> float | None:
    """The end of a job in Unix seconds, from the output of `squeue_command`; None: it has none (no limit, or pending).

    The output has one line for each job, with Unix seconds or the local time in ISO 8601; its state may follow.

    Raises:
        InvalidAnswerError: the job is not in it, or its end is no date.
    """
    ends = [words[1] for words in map(str.split, output.splitlines()) if len(words) in (2, 3) and words[0] == job_id]
    if not ends:
        raise InvalidAnswerError(f"squeue does not list job {job_id}: {output[:60]!r}")
    text = ends[0]
    if text.upper() in _NO_END:
        return None
    try:
        seconds = float(text) if text.isdecimal() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidAnswerError(f"squeue says that job {job_id} ends at {text[:60]!r}, which is no date") from None
    if not 1e9 < seconds < 1e11:
        raise InvalidAnswerError(f"squeue says that job {job_id} ends at {text[:60]!r}, which is no date of these days")
    return seconds


def interval_s(processes: int, left_s: float | None = None) -> float:
    """Seconds between two polls of one process: a minute, less near the end, more in a large job.

    Args:
        processes: of the job, all of which poll the controller.
        left_s: until the end of the job, if that is known.

    >>> interval_s(8), interval_s(8, left_s=50.0), interval_s(1024, left_s=50.0)
    (60.0, 25.0, 1024.0)
    """
    wanted_s = _INTERVAL_S if left_s is None else min(_INTERVAL_S, max(_INTERVAL_NEAR_S, left_s / 2))
    return max(wanted_s, _LEAST_INTERVAL_S * processes)


class SlurmDeadline(Notices):
    """The end of the SLURM job that this process belongs to. `poll` updates it; have a `Poller` call that.

    Args:
        job_id: of the job.
        end: its end as the environment has it; None: not known yet.
        processes: of the whole job.
        runner: runs `squeue`.
        clock: monotonic seconds; that of the deadline.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        job_id: str,
        *,
        end: DeadlineAt | None = None,
        processes: int = 1,
        runner: Runner = run_command,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("SLURM", f"squeue knows no end of job {job_id}")
        self.job_id = job_id
        self._processes, self._runner, self._clock, self._wall_clock = processes, runner, clock, wall_clock
        self._end_s: float | None = None
        self._failures = 0
        self._look_again: Callable[[float], None] | None = None
        if end is not None:
            self.tell([Notice(self.name, "end", end.at_s, end.reason)])

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str],
        *,
        runner: Runner = run_command,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> SlurmDeadline | None:
        """The deadline; None outside of a job. An end that is over is ignored, with a warning.

        Raises:
            ValueError: SLURM_JOB_END_TIME is no date in Unix seconds.
        """
        job_id = environment.get(JOB_VARIABLE, "").strip()
        value = environment.get(END_VARIABLE, "")
        end = deadline_in_variable("SLURM", END_VARIABLE, value, now_s=clock(), wall_s=wall_clock())
        if not job_id.isdecimal():
            if end is None:
                return None
            job_id = ""
        sizes = [environment.get(name, "") for name in ("SLURM_NTASKS", "WORLD_SIZE")]
        processes = max(int(size) if size.isdecimal() else 1 for size in sizes)
        return cls(job_id, end=end, processes=processes, runner=runner, clock=clock, wall_clock=wall_clock)

    def when_asked_again(self, look_again: Callable[[float], None]) -> None:
        """Set what `look_again` calls: it has to have `poll` called in so many seconds."""
        self._look_again = look_again

    def look_again(self) -> None:
        """Poll soon, on the polling thread: something has happened. Any thread may call it."""
        if self._look_again is not None:
            self._look_again(random.uniform(0.0, _SPREAD_S * self._processes))

    def poll(self) -> float | None:
        """Run squeue once. See `poller.Poll`."""
        if not self.job_id:
            return None
        try:
            output = self._runner(squeue_command(self.job_id), {"SLURM_TIME_FORMAT": "%s"}, SQUEUE_TIMEOUT_S)
            if is_being_ended(output, self.job_id):
                return self._following_s()
            end_s = parse_end_time(output, self.job_id)
        except NoCommandError as error:
            level = logging.DEBUG if self.notices else logging.WARNING
            log.log(level, "SLURM: %s, so the end of job %s is only known from %s", error, self.job_id, END_VARIABLE)
            return None
        except (SlurmCommandError, InvalidAnswerError) as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("SLURM: the end of job %s is not known; retrying: %s", self.job_id, error)
            return self._following_s()
        self._failures = 0
        self._take(end_s)
        return self._following_s()

    def _following_s(self) -> float:
        """Not all processes at the same moment."""
        return interval_s(self._processes, self.remaining_s(self._clock())) * random.uniform(0.9, 1.1)

    def _take(self, end_s: float | None) -> None:
        """A date becomes monotonic time when it is first read; an unchanged one stays what it was."""
        if end_s is None:
            self._end_s = None
            self.tell([])
        elif self._end_s is None or not math.isclose(end_s, self._end_s, rel_tol=0.0, abs_tol=0.5):
            self._end_s = end_s
            at_s = self._clock() + end_s - self._wall_clock()
            until = datetime.fromtimestamp(end_s).astimezone().isoformat(sep=" ", timespec="seconds")
            self.tell([Notice(self.name, "end", at_s, f"squeue says that job {self.job_id} ends at {until}")])
