"""How an attempt of a job on a short-lived instance has ended, what it has cost, and what now: pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any

from torchelastic.lifetime.progress_file import Steps
from torchelastic.processes.exit_codes import STOPPED_EARLY, describe_exit
from torchelastic.text import counted

#: What a shell returns for a command that it cannot run or find; a restart does not help.
UNRUNNABLE_CODES = (126, 127)
#: Unless the user says how often: how many restarts, and how many failures in a row end it before.
MAX_RESTARTS, MAX_FAILURES = 100, 3
#: The layout of the report.
SCHEMA = 1
_TITLES = ("attempt", "ended", "exit", "used s", "unused s", "from step", "to step", "saved", "steps lost")


class How(Enum):
    """How an attempt has ended: docs/simulate-esi.md has the table."""

    FINISHED = "finished"
    STOPPED = "stopped early"
    ENDED = "ended in time"
    KILLED = "killed"
    FAILED = "failed"
    UNRUNNABLE = "cannot be run"


@dataclass(frozen=True)
class Attempt:
    """One attempt of the job: what was seen of its end, and what the job has reported.

    Attributes:
        exit_code: of the command; negative: the signal that ended it.
        used_s: seconds from its start until nothing of it was left.
        left_s: seconds that it still had when the command ended; 0 if its time was over.
        timed_out: its time was over, and it was sent SIGTERM.
        killed: how many of its processes got SIGKILL: after the grace, or because the command ended without them.
        told: the steps that it has reported.
        requeue_codes: exit codes that mean "stopped before the deadline, start me again".
    """

    exit_code: int
    used_s: float
    left_s: float = 0.0
    timed_out: bool = False
    killed: int = 0
    told: Steps = field(default_factory=Steps)
    requeue_codes: Collection[int] = (STOPPED_EARLY,)

    @property
    def how(self) -> How:
        """How it has ended.

        An exit with 0 after SIGTERM does not mean that the work is done: a job that saves in its handler and exits with
        0 looks the same, and schedulers call both a time-out. So it is started again; if it had finished, it has
        nothing to do in its next attempt. A job that reports its progress (`total_steps`) is believed.
        """
        done, total = self.told.committed_step, self.told.total_steps
        is_incomplete = done is not None and total is not None and done < total
        is_complete = done is not None and total is not None and done >= total
        if self.timed_out:
            if self.exit_code == 0 and is_complete:
                return How.FINISHED
            return How.KILLED if self.killed else How.ENDED
        if self.exit_code in self.requeue_codes:
            return How.STOPPED
        if self.exit_code == 0:
            return How.STOPPED if is_incomplete else How.FINISHED
        if self.exit_code > 0 and is_incomplete and self.told.saved_step == done:
            return How.STOPPED
        return How.UNRUNNABLE if self.exit_code in UNRUNNABLE_CODES else How.FAILED

    @property
    def given_up_s(self) -> float:
        """Seconds that it had left when it ended without having finished."""
        return 0.0 if self.how is How.FINISHED else self.left_s

    def __str__(self) -> str:
        """One line for people."""
        parts = [f"{self.how.value} ({exit_text(self.exit_code)}) after {self.used_s:.1f} s"]
        if self.given_up_s:
            parts.append(f"{self.given_up_s:.1f} s unused")
        if self.killed:
            what = "in the grace" if self.timed_out else "with the command"
            parts.append(f"SIGKILL to {counted(self.killed, 'process', 'processes')} that did not end {what}")
        told = asdict(self.told).items()
        return ", ".join(parts + [f"{name.replace('_', ' ')} {step}" for name, step in told if step is not None])


@dataclass(frozen=True)
class Verdict:
    """Whether the job is started again; if not, the simulator's exit code. Why, in one phrase for people."""

    goes_on: bool
    exit_code: int
    reason: str


def what_next(attempts: Sequence[Attempt], max_restarts: int | None = None) -> Verdict:
    """Whether the job is started again after these attempts, and why.

    Args:
        attempts: at least one.
        max_restarts: how often it is started again, whatever the reason; None: 100 times, but not after 3 failures in
            a row.
    """
    last, restarts = attempts[-1], len(attempts) - 1
    most = MAX_RESTARTS if max_restarts is None else max_restarts
    if last.how is How.FINISHED:
        return Verdict(False, 0, f"finished in attempt {len(attempts)}")
    if last.how is How.UNRUNNABLE:
        return Verdict(False, 1, f"the command cannot be run ({exit_text(last.exit_code)})")
    if max_restarts is None and [attempt.how for attempt in attempts[-MAX_FAILURES:]] == [How.FAILED] * MAX_FAILURES:
        return Verdict(False, 1, f"failed {MAX_FAILURES} times in a row ({exit_text(last.exit_code)})")
    if restarts >= most:
        return Verdict(False, 1, f"not finished after {counted(restarts, 'restart')}: that is --max-restarts")
    return Verdict(True, 0, f"restart {restarts + 1} of at most {most}")


def steps_lost(attempt: Attempt, next_attempt: Attempt | None) -> int | None:
    """How many committed steps of an attempt had to be done again; None: it cannot be known.

    What the next attempt says it has gone on from counts; where it says nothing, the last one that was said
    to be saved.
    """
    if attempt.how is How.FINISHED:
        return 0
    kept = next_attempt.told.resumed_step if next_attempt else None
    kept = attempt.told.saved_step if kept is None else kept
    return None if kept is None or attempt.told.committed_step is None else max(0, attempt.told.committed_step - kept)


def report_document(attempts: Sequence[Attempt], verdict: Verdict) -> dict[str, Any]:
    """What is known of all attempts, for `json.dumps`; see docs/simulate-esi.md."""
    lost = [steps_lost(*pair) for pair in zip_longest(attempts, attempts[1:])]
    known = [steps for steps in lost if steps is not None]
    return {
        "schema": SCHEMA,
        "finished": bool(attempts) and attempts[-1].how is How.FINISHED,
        "reason": verdict.reason,
        "used_s": round(math.fsum(attempt.used_s for attempt in attempts), 3),
        "given_up_s": round(math.fsum(attempt.given_up_s for attempt in attempts), 3),
        "steps_lost": sum(known) if known else None,
        "lives": [
            {
                "life": number,
                "how": attempt.how.name.lower(),
                "exit_code": attempt.exit_code,
                "used_s": round(attempt.used_s, 3),
                "given_up_s": round(attempt.given_up_s, 3),
                "killed_processes": attempt.killed,
                **asdict(attempt.told),
                "steps_lost": steps,
            }
            for number, (attempt, steps) in enumerate(zip(attempts, lost, strict=True), 1)
        ],
    }


def table(document: dict[str, Any]) -> str:
    """The table for people, with the sums last, from `report_document`'s result."""

    def texts(steps: dict[str, Any], *names: str) -> tuple[str, ...]:
        return tuple("?" if steps[name] is None else str(steps[name]) for name in names)

    shown = [
        (
            str(attempt["life"]),
            How[attempt["how"].upper()].value,
            exit_text(attempt["exit_code"]).removeprefix("exit code "),
            f"{attempt['used_s']:.1f}",
            f"{attempt['given_up_s']:.1f}",
            *texts(attempt, "resumed_step", "committed_step", "saved_step", "steps_lost"),
        )
        for attempt in document["lives"]
    ]
    sums = (f"{document['used_s']:.1f}", f"{document['given_up_s']:.1f}")
    rows = [_TITLES, *shown, ("all", "", "", *sums, "", "", "", *texts(document, "steps_lost"))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if title in ("attempt", "ended", "exit") else cell.rjust(width)
            for title, cell, width in zip(_TITLES, row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def exit_text(exit_code: int) -> str:
    """A phrase for people.

    >>> exit_text(3), exit_text(-9)
    ('exit code 3', 'SIGKILL')
    """
    return describe_exit(exit_code).removeprefix("killed by ")
