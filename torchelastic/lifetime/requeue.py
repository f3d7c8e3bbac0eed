"""Stopping before a deadline: the exit code, the exception, and the request to the scheduler to requeue the job.

From SLURM's manual pages: scontrol(1) (`requeue`: a running batch job is ended, and put back into the queue under its
id; `ARRAYID_TASKID` for one element of an array), sbatch(1) (`SLURM_RESTART_COUNT`: how often it was started again).
The texts of final refusals are those of `src/common/slurm_errno.c`.

`scontrol requeue` also undoes `scancel`, as long as processes of the job are left (seen with 22.05). So squeue is asked
before: a job that is being ended is COMPLETING, with the reason TimeLimit if it was over its limit, and with None if it
was cancelled or requeued; the second has raised its number of restarts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tenacity import RetryCallState, Retrying, before_sleep_log, retry_if_exception, wait_exponential

from torchelastic.checkpoint.policy.arguments import real_number, whole_number
from torchelastic.lifetime.sources.slurm import JOB_VARIABLE, NoCommandError, Runner, SlurmCommandError, run_command
from torchelastic.processes.exit_codes import STOPPED_EARLY as STOPPED_EARLY

log = logging.getLogger(__name__)

RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
ARRAY_VARIABLES = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
#: Requests to a controller that does not answer are retried: time-out of each, and the shortest and longest pause.
ATTEMPT_S, PAUSE_S, MAX_PAUSE_S = 10.0, 1.0, 10.0
#: Time-out of all retries. A restart of slurmctld may take more than a minute, and without this the chain of jobs ends.
PATIENCE_S = 120.0
#: SLURM ends the processes of a job so long after its limit (KillWait, less a reserve; a site may have another).
AFTER_LIMIT_S = 20.0
#: Time-out of the question whether the job was cancelled.
STATE_S = 5.0
#: Errors of SLURM that a retry does not change.
_FINAL = (
    "only batch jobs",
    "operation is presently disabled",
    "invalid job id",
    "permission denied",
    "already completing or completed",
)


class StoppedEarly(SystemExit):
    """`torchelastic.train` stops before a deadline; a script that does not catch it ends with code `STOPPED_EARLY`.

    Raised on every rank that stops. Catch it to do something before the end (`finally` runs too), and raise it again: a
    run that has stopped early is not finished.

    Attributes:
        step: committed steps of the run; the next start resumes after them.
        saved_in: the tiers in which that step is durable; empty if there is no checkpoint manager, or others train on.
        others_go_on: whether only this worker has left, and the others train on.
        because: one sentence.
    """

    def __init__(self, because: str, *, step: int, saved_in: tuple[str, ...] = (), others_go_on: bool = False) -> None:
        super().__init__(STOPPED_EARLY)
        self.because, self.step, self.saved_in, self.others_go_on = because, step, saved_in, others_go_on

    def __str__(self) -> str:
        return self.because


@dataclass(frozen=True)
class Requeue:
    """Whether the scheduler was asked to start the job again.

    Attributes:
        asked: it was, and has accepted.
        because: a few words for the log.
    """

    asked: bool
    because: str


def plan_requeue(environment: Mapping[str, str], max_restarts: int) -> tuple[str, str]:
    """Which job to requeue, which may be started `max_restarts` times in all, by these environment variables.

    Returns:
        Its id as scontrol takes it, "" for none; and a few words for the log.

    >>> plan_requeue({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "3"}, 100)
    ('42', 'restart 4 of at most 100')
    """
    job_id = environment.get(JOB_VARIABLE, "").strip()
    if not job_id:
        return "", f"this is no SLURM job ({JOB_VARIABLE} is not set)"
    array_id, task_id = (environment.get(name, "").strip() for name in ARRAY_VARIABLES)
    if array_id and task_id:
        job_id = f"{array_id}_{task_id}"
    if not all(part.isdecimal() for part in job_id.split("_")):
        return "", f"{job_id!r} is no SLURM job: see {JOB_VARIABLE}, {' and '.join(ARRAY_VARIABLES)}"
    text = environment.get(RESTARTS_VARIABLE, "").strip()
    if text and not text.isdecimal():
        return "", f"{RESTARTS_VARIABLE} is {text!r}, which is no number: it might go on for ever"
    restarts = int(text or 0)
    if restarts >= max_restarts:
        return "", f"job {job_id} was started again {restarts} times, and max_restarts is {max_restarts}"
    return job_id, f"restart {restarts + 1} of at most {max_restarts}"


def state_command(job_id: str) -> list[str]:
    """The command that prints state, reason and number of restarts of a job."""
    return ["squeue", "--noheader", "--jobs", job_id, "--Format", "State,Reason,RestartCnt"]


def who_ends_it(output: str, restarts: int) -> str:
    """Why a job must not be requeued, from the output of `state_command`; "": it may, or nothing is known.

    `restarts` is how often the job had been started again when its present run began.

    >>> who_ends_it("COMPLETING None 0", 0), who_ends_it("COMPLETING None 1", 0)
    ('somebody has cancelled it', 'somebody has requeued it already')
    >>> who_ends_it("RUNNING None 0", 0), who_ends_it("COMPLETING TimeLimit 0", 0)
    ('', '')
    """
    words = output.split()
    if len(words) != 3 or not words[2].isdecimal():
        return ""
    state, reason, count = words[0], words[1], int(words[2])
    if count > restarts:
        return "somebody has requeued it already"
    is_cancelled = state == "CANCELLED" or (state == "COMPLETING" and reason == "None")
    return "somebody has cancelled it" if is_cancelled else ""


def requeue_patience_s(left_s: float) -> float:
    """Time-out of a requeue with so long until the limit of the job; negative: that is over; infinite: not known.

    >>> requeue_patience_s(5.0), requeue_patience_s(600.0), requeue_patience_s(-60.0)
    (25.0, 120.0, 10.0)
    """
    return min(PATIENCE_S, max(ATTEMPT_S, left_s + AFTER_LIMIT_S))


def requeue_job(
    *,
    max_restarts: int = 100,
    patience_s: float = PATIENCE_S,
    environment: Mapping[str, str] | None = None,
    runner: Runner = run_command,
    sleep: Callable[[float], None] = time.sleep,
) -> Requeue:
    """In a SLURM batch job: put it back into the queue (`scontrol requeue`). Elsewhere nothing is done.

    Called by one rank, once the save is durable: SLURM ends the present run of the job at once (SIGTERM, and SIGKILL
    after KillWait). A job that was cancelled stays cancelled. Requests to a controller that does not answer (it may be
    restarting) are retried. If it refuses, or never answers, that is no error, but in the result and in the log.

    Args:
        max_restarts: how often the job may be started again in all (`SLURM_RESTART_COUNT`); 0: not at all.
        patience_s: no attempt begins later than this; one takes at most 10 s, and the question before it 5 s.
        environment: variables; default: those of this process.
        runner: runs `squeue` and `scontrol`.
        sleep: waits for so many seconds.

    Raises:
        TypeError: `max_restarts` is no whole number, or `patience_s` no number.
        ValueError: one of them is negative.
    """
    real_number("patience_s", patience_s, remedy="give how many seconds to ask for, 0 or more")
    whole_number("max_restarts", max_restarts, at_least=0, remedy="give how often the job may be started again")
    variables = os.environ if environment is None else environment
    job_id, because = plan_requeue(variables, max_restarts)
    if job_id and (why_not := _why_not(job_id, variables, runner)):
        job_id, because = "", f"job {job_id}: {why_not}"
    if not job_id:
        log.info("not requeued: %s", because)
        return Requeue(False, because)
    attempts = Retrying(
        stop=partial(_is_over, patience_s),
        wait=wait_exponential(PAUSE_S, max=MAX_PAUSE_S),
        retry=retry_if_exception(_may_pass),
        before_sleep=before_sleep_log(log, logging.WARNING),
        sleep=sleep,
        reraise=True,
    )
    try:
        attempts(runner, ["scontrol", "requeue", job_id], {}, ATTEMPT_S)
    except SlurmCommandError as error:
        log.warning("job %s was not requeued: %s", job_id, error)
        return Requeue(False, str(error))
    log.warning("job %s was requeued: %s", job_id, because)
    return Requeue(True, because)


def _is_over(patience_s: float, state: RetryCallState) -> bool:
    """Whether the next attempt would begin too late, by the pauses as requested."""
    waited_s = max(state.idle_for, state.seconds_since_start or 0.0)
    return waited_s + state.upcoming_sleep > patience_s


def _why_not(job_id: str, variables: Mapping[str, str], runner: Runner) -> str:
    """See `who_ends_it`; "" if squeue fails."""
    try:
        output = runner(state_command(job_id), {}, STATE_S)
    except SlurmCommandError as error:
        log.warning("whether somebody has cancelled job %s is not known: %s", job_id, error)
        return ""
    return who_ends_it(output, int(variables.get(RESTARTS_VARIABLE, "").strip() or 0))


def _may_pass(error: BaseException) -> bool:
    """Whether a retry may help."""
    if not isinstance(error, SlurmCommandError) or isinstance(error, NoCommandError):
        return False
    text = str(error).lower()
    return not any(final in text for final in _FINAL)
