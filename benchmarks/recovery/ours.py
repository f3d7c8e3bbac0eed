"""One job of ours whose workers are killed one after the other, and what each kill has cost."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import summary
from benchmarks.job.controller import Job, Kill, NotReachedError
from benchmarks.job.events import Event
from benchmarks.job.processes import Load
from benchmarks.recovery.progress import Progress
from benchmarks.recovery.stacks import Dump, StackWitness

PHASES = ("detect", "agree", "re_form", "sync", "step")
#: Processes that wait for the place of a killed one. Restarted ones import only when these are used up.
SPARES = 5
#: Committed by the survivors before the next one joins: what an undisturbed step of theirs takes.
PLAIN_STEPS = 5
#: Lines of the agent's output that tell why a run ended early.
LOG_LINES = 20


@dataclass
class Recovery:
    """One kill, and one event of each survivor, in the order in which they committed their next step.

    Attributes:
        stacks: of the survivors, where it took long.
        plain_step_ms: undisturbed steps of the survivors right after it; empty: they had no such group.
    """

    kill: Kill
    survivors: list[Event]
    stacks: list[Dump] = field(default_factory=list)
    plain_step_ms: list[float] = field(default_factory=list)

    @property
    def total_ms(self) -> float:
        """From the signal until the last survivor has committed its next step."""
        return 1000 * (float(self._last["t"]) - self.kill.killed_s)

    @property
    def beyond_one_step_ms(self) -> float | None:
        """The total less one undisturbed step; None: there was no undisturbed step to take off."""
        return self.total_ms - statistics.median(self.plain_step_ms) if self.plain_step_ms else None

    @property
    def kernel_ms(self) -> float:
        """From the signal until the kernel tells of the process's end."""
        return 1000 * (self.kill.ended_s - self.kill.killed_s)

    @property
    def all_know_ms(self) -> float:
        """From the process's end until the last survivor knows; negative: all knew before, by closed connections."""
        return 1000 * (max(float(event["noticed"]) for event in self.survivors) - self.kill.ended_s)

    @property
    def first_knows_ms(self) -> float:
        """The same for the first survivor."""
        return 1000 * (min(float(event["noticed"]) for event in self.survivors) - self.kill.ended_s)

    @property
    def phases_ms(self) -> dict[str, float]:
        """Those of the last survivor; they add up to the total, but for the note of the last one."""
        detect = {"detect": 1000 * (self._last["noticed"] - self.kill.killed_s)}
        return detect | {phase: float(self._last["phases"][phase]) for phase in PHASES[1:]}

    @property
    def _last(self) -> Event:
        return self.survivors[-1]


@dataclass(frozen=True)
class Censored:
    """One kill from which the survivors had not recovered when it was given up: all that is known is "longer".

    Attributes:
        waited_ms: from the signal until then.
        reason: why it was given up.
    """

    kill: Kill
    waited_ms: float
    reason: str
    stacks: list[Dump]

    def document(self) -> dict[str, Any]:
        return {"rank": self.kill.rank, "waited_ms": round(self.waited_ms, 2), "reason": self.reason}


@dataclass
class Kills:
    """What the kills of one job have cost, in their order.

    Attributes:
        recoveries: those that came to an end.
        censored: those that did not.
        ended_early: why no more workers were killed; None: all were that were to be.
    """

    recoveries: list[Recovery] = field(default_factory=list)
    censored: list[Censored] = field(default_factory=list)
    ended_early: NotReachedError | None = None

    def __len__(self) -> int:
        return len(self.recoveries) + len(self.censored)

    def slowest(self) -> dict[str, Any]:
        """The kill whose recovery took longest, with the stacks of the survivors; a censored one is the slowest."""
        if self.censored:
            last = self.censored[-1]
            return {**last.document(), "stacks": [dump.document() for dump in last.stacks]}
        slowest = max(self.recoveries, key=lambda recovery: recovery.total_ms)
        return {
            "rank": slowest.kill.rank,
            "total_ms": round(slowest.total_ms, 2),
            "phases_ms": {phase: round(ms, 2) for phase, ms in slowest.phases_ms.items()},
            "stacks": [dump.document() for dump in slowest.stacks],
        }


@dataclass
class Figures:
    """What one job has shown."""

    parameters: int
    kills: Kills
    full_steps_ms: list[float]
    all_reduces_ms: list[float]

    def document(self) -> dict[str, Any]:
        """For JSON; figures of which there is no value are None."""
        recoveries, censored = self.kills.recoveries, len(self.kills.censored)
        plain = [ms for recovery in recoveries for ms in recovery.plain_step_ms]
        beyond = [ms for recovery in recoveries if (ms := recovery.beyond_one_step_ms) is not None]
        document: dict[str, Any] = {
            "parameters": self.parameters,
            "kill_to_committed_ms": _summary([r.total_ms for r in recoveries], censored=censored),
            "beyond_one_step_ms": _summary(beyond, censored=censored),
            "end_of_process_to_all_know_ms": _summary([r.all_know_ms for r in recoveries]),
            "end_of_process_to_first_knows_ms": _summary([r.first_knows_ms for r in recoveries]),
            "kill_to_end_of_process_ms": _summary([r.kernel_ms for r in recoveries]),
            "phases_ms": {phase: _summary([r.phases_ms[phase] for r in recoveries]) for phase in PHASES},
            "of_rank_0": sum(1 for r in recoveries if r.kill.rank == 0),
            "survivors_step_ms": _summary(plain),
            "full_step_ms": _summary(self.full_steps_ms),
            "all_reduce_ms": _summary(self.all_reduces_ms, 3),
        }
        if len(self.kills):
            document["slowest_kill"] = self.kills.slowest()
        if self.kills.censored:
            document["censored"] = [one.document() for one in self.kills.censored]
        if self.kills.ended_early is not None:
            error = self.kills.ended_early
            log = error.agent_log.splitlines()[-LOG_LINES:]
            document["ended_early"] = {"after_kills": len(self.kills), "reason": error.reason, "agent_log": log}
        return document


def _summary(values: Sequence[float], digits: int = 2, censored: int = 0) -> dict[str, Any] | None:
    return summary(values, digits, censored) if values else None


def measure(
    model: str, salvage: str, kills: int, workers: int, step_ms: float, load: int, progress: Progress
) -> Figures:
    """Run one job and kill so many of its workers, ranks 0, 1, ... in turn.

    However long a recovery takes, it is a result: a job that cannot go on ends the run early, and raises nothing.

    Args:
        model: a name of `benchmarks.job.models`.
        salvage: a mode of `ModelState`.
        kills: how many.
        workers: of a full group.
        step_ms: what a full step sleeps besides computing.
        load: busy processes beside the job while its workers are killed.
        progress: told of every kill.
    """
    spares = min(kills, SPARES)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"model": model, "salvage": salvage, "step_ms": step_ms, "probe": "all_reduce"}
        with Job(Path(folder), workers=workers, spares=spares, **options) as job:
            try:
                job.start()
                job.wait_full(steps=1)
            except NotReachedError as error:
                return Figures(0, Kills(ended_early=error), [], [])
            with Load(load):
                done = kill_in_turn(job, kills, progress)
            steps = [event["ms"] for event in job.read.of("committed", world=workers) if event["number"] >= 5]
            all_reduces = [event["ms"] for event in job.read.of("all_reduce")]
            parameters = job.read.of("warm")[0]["parameters"]
    return Figures(parameters, done, steps[:400], all_reduces)


def kill_in_turn(job: Job, kills: int, progress: Progress) -> Kills:
    """Kill so many workers of a job, one after the other, each in a full group; see `measure`."""
    done = Kills()
    missing = 0
    try:
        for number in range(kills):
            if job.warm_spares() < missing:
                job.warm_up()
            job.allow("join", missing)
            job.wait_full(steps=8)
            recovery = _kill(job, number % job.workers, done, progress)
            missing = job.workers - len(recovery.survivors)
    except NotReachedError as error:
        done.ended_early = error
    return done


def _kill(job: Job, rank: int, done: Kills, progress: Progress) -> Recovery:
    """Kill one worker and add the result to `done`. Raises NotReachedError: the job cannot go on."""
    kill = job.kill(rank)
    progress.killed(kill.killed_s)
    witness = StackWitness(job, kill)
    try:
        recovery = Recovery(kill, job.wait_recovered(kill, witness.look))
    except NotReachedError as error:
        waited_ms = 1000 * (time.monotonic() - kill.killed_s)
        done.censored.append(Censored(kill, waited_ms, error.reason, witness.dumps()))
        progress.recovered(waited_ms)
        raise
    done.recoveries.append(recovery)
    progress.recovered(recovery.total_ms)
    recovery.stacks = witness.dumps()
    world = len(recovery.survivors)
    round_number = job.wait_until(lambda: job.full_group(1 + PLAIN_STEPS, world), "the survivors' next steps")
    plain = [event["ms"] for event in job.read.of("committed", round=round_number) if event["number"] > 0]
    recovery.plain_step_ms = plain
    return recovery
