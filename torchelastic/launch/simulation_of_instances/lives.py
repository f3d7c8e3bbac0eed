"""How a life of the job has ended, what it has cost, and what now: pure functions."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torchelastic.launch.simulation_of_instances.progress_file import Progress
from torchelastic.lifetime.requeue import STOPPED_EARLY

#: What a job that stops early to be started again says.
REQUEUE_CODE = STOPPED_EARLY
#: What a shell returns for a command that it cannot run or find; to start it again mends nothing.
UNRUNNABLE_CODES = (126, 127)


class How(Enum):
    """How a life has ended."""

    FINISHED = "finished"
    #: By itself and before its time was over, to be started again.
    STOPPED = "stopped early"
    #: After the SIGTERM at the end of its time, within the grace.
    ENDED = "ended in time"
    #: By SIGKILL after the grace, or a part of it was.
    KILLED = "killed"
    FAILED = "failed"
    #: The shell could not run the command.
    UNRUNNABLE = "cannot be run"


@dataclass(frozen=True)
class Ending:
    """What was seen of the end of one life.

    Attributes:
        exit_code: of the command; negative: the signal that ended it.
        used_s: seconds from its start until nothing of it was left.
        given_up_s: seconds that it still had when the command ended; 0 if its time was over.
        timed_out: its time was over, and it was sent SIGTERM.
        killed: how many of its processes got SIGKILL: after the grace, or because the command ended without them.
    """

    exit_code: int
    used_s: float
    given_up_s: float = 0.0
    timed_out: bool = False
    killed: int = 0


@dataclass(frozen=True)
class Life:
    """One life of the job, with what the job has told about it."""

    how: How
    ending: Ending
    told: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Limits:
    """When to give up.

    Attributes:
        max_restarts: how often it is started again, whatever the reason.
        failures_in_a_row: after so many it is not started again either; None: they only count as restarts.
    """

    max_restarts: int = 100
    failures_in_a_row: int | None = 3


@dataclass(frozen=True)
class Verdict:
    """What now.

    Attributes:
        goes_on: whether the job is started again.
        exit_code: of the simulator, if not.
        reason: one phrase for people.
    """

    goes_on: bool
    exit_code: int
    reason: str


def judge(ending: Ending, told: Progress, requeue_codes: Collection[int] = (REQUEUE_CODE,)) -> How:
    """How a life has ended.

    An exit with 0 after SIGTERM does not mean that the work is done: a job that saves in its handler and exits with 0
    looks the same, and schedulers call both a time-out. So it is started again; if it had finished, it has nothing to
    do in its next life. A job that tells its progress (`total_steps`) is believed.

    Args:
        ending: what was seen.
        told: what the job has told.
        requeue_codes: exit codes that mean "stopped before the deadline, start me again".
    """
    if ending.timed_out:
        if ending.exit_code == 0 and told.is_complete:
            return How.FINISHED
        return How.KILLED if ending.killed else How.ENDED
    if ending.exit_code in requeue_codes:
        return How.STOPPED
    if ending.exit_code == 0:
        return How.STOPPED if told.is_incomplete else How.FINISHED
    if ending.exit_code > 0 and told.is_incomplete and told.saved_step == told.committed_step:
        return How.STOPPED
    return How.UNRUNNABLE if ending.exit_code in UNRUNNABLE_CODES else How.FAILED


def what_next(lives: Sequence[Life], limits: Limits) -> Verdict:
    """Whether the job is started again after these lives, of which there is at least one, and why.

    Raises:
        ValueError: there was no life yet.
    """
    if not lives:
        raise ValueError("there was no life yet: nothing can be decided")
    last, restarts = lives[-1], len(lives) - 1
    if last.how is How.FINISHED:
        return Verdict(False, 0, f"finished in life {len(lives)}")
    if last.how is How.UNRUNNABLE:
        return Verdict(False, 1, f"the command cannot be run ({describe_exit(last.ending.exit_code)})")
    failures = _failures_in_a_row(lives)
    if limits.failures_in_a_row is not None and failures >= limits.failures_in_a_row:
        return Verdict(False, 1, f"failed {failures} times in a row ({describe_exit(last.ending.exit_code)})")
    if restarts >= limits.max_restarts:
        plural = "" if restarts == 1 else "s"
        return Verdict(False, 1, f"not finished after {restarts} restart{plural}: that is --max-restarts")
    return Verdict(True, 0, f"restart {restarts + 1} of at most {limits.max_restarts}")


def steps_lost(lives: Sequence[Life]) -> list[int | None]:
    """Of each life, how many committed steps its successors had to do again; None: it cannot be known.

    What the next life says it has gone on from counts; where it says nothing, the last step that was said to be saved.
    """
    return [_lost(life, lives[number + 1 :]) for number, life in enumerate(lives)]


def totals(lives: Sequence[Life]) -> tuple[float, float, int | None]:
    """Seconds used, seconds given up, and steps lost by all lives of which that is known (None: by none)."""
    known = [lost for lost in steps_lost(lives) if lost is not None]
    used_s = math.fsum(life.ending.used_s for life in lives)
    return used_s, math.fsum(given_up_s(life) for life in lives), sum(known) if known else None


def given_up_s(life: Life) -> float:
    """Seconds that a life had left when it ended without having finished."""
    return 0.0 if life.how is How.FINISHED else life.ending.given_up_s


def describe_exit(exit_code: int) -> str:
    """A phrase for people.

    >>> describe_exit(3), describe_exit(-9), describe_exit(-40)
    ('exit code 3', 'SIGKILL', 'signal 40')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-exit_code}"


def _failures_in_a_row(lives: Sequence[Life]) -> int:
    count = 0
    for life in reversed(lives):
        if life.how is not How.FAILED:
            break
        count += 1
    return count


def _lost(life: Life, later: Sequence[Life]) -> int | None:
    told = life.told
    if life.how is How.FINISHED:
        return 0
    if told.committed_step is None:
        return None
    kept = later[0].told.resumed_step if later else None
    if kept is None:
        kept = told.saved_step
    return None if kept is None else max(0, told.committed_step - kept)
