"""One job of ours whose workers are killed one after the other, and what each kill has cost."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import summary
from benchmarks.job.controller import Job, Kill
from benchmarks.job.events import Event

PHASES = ("detect", "agree", "re_form", "sync", "step")
#: Processes that wait for the place of a killed one. Restarted ones import only when these are used up.
SPARES = 5
#: Committed by the survivors before the next one joins: what an undisturbed step of theirs takes.
PLAIN_STEPS = 5


@dataclass
class Recovery:
    """One kill, and one event of each survivor, in the order in which they committed their next step.

    Attributes:
        plain_step_ms: undisturbed steps of the survivors right after it.
    """

    kill: Kill
    survivors: list[Event]
    plain_step_ms: list[float] = field(default_factory=list)

    @property
    def total_ms(self) -> float:
        """From the signal until the last survivor has committed its next step."""
        return 1000 * (float(self._last["t"]) - self.kill.killed_s)

    @property
    def beyond_one_step_ms(self) -> float:
        """The total less one undisturbed step."""
        return self.total_ms - statistics.median(self.plain_step_ms)

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


@dataclass
class Figures:
    """What one job has shown."""

    parameters: int
    recoveries: list[Recovery]
    full_steps_ms: list[float]
    all_reduces_ms: list[float]

    def document(self) -> dict[str, Any]:
        recoveries = self.recoveries
        plain = [ms for recovery in recoveries for ms in recovery.plain_step_ms]
        return {
            "parameters": self.parameters,
            "kill_to_committed_ms": summary([r.total_ms for r in recoveries]),
            "beyond_one_step_ms": summary([r.beyond_one_step_ms for r in recoveries]),
            "end_of_process_to_all_know_ms": summary([r.all_know_ms for r in recoveries]),
            "end_of_process_to_first_knows_ms": summary([r.first_knows_ms for r in recoveries]),
            "kill_to_end_of_process_ms": summary([r.kernel_ms for r in recoveries]),
            "phases_ms": {phase: summary([r.phases_ms[phase] for r in recoveries]) for phase in PHASES},
            "of_rank_0": sum(1 for r in recoveries if r.kill.rank == 0),
            "survivors_step_ms": summary(plain),
            "full_step_ms": summary(self.full_steps_ms),
            "all_reduce_ms": summary(self.all_reduces_ms, 3),
        }


def measure(model: str, salvage: str, kills: int, workers: int, step_ms: float) -> Figures:
    """Run one job and kill so many of its workers; ranks 0, 1, .. in turn."""
    spares = min(kills, SPARES)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"model": model, "salvage": salvage, "step_ms": step_ms, "probe": "all_reduce"}
        with Job(Path(folder), workers=workers, spares=spares, **options) as job:
            job.start()
            recoveries = []
            for number in range(kills):
                if number and not job.warm_spares():
                    job.warm_up()
                if number:
                    job.allow("join", 1)
                job.wait_full(steps=8)
                recoveries.append(_kill(job, number % workers))
            steps = [event["ms"] for event in job.read.of("committed", world=workers) if event["number"] >= 5]
            all_reduces = [event["ms"] for event in job.read.of("all_reduce")]
            parameters = job.read.of("warm")[0]["parameters"]
    return Figures(parameters, recoveries, steps[:400], all_reduces)


def _kill(job: Job, rank: int) -> Recovery:
    kill = job.kill(rank)
    recovery = Recovery(kill, job.wait_recovered(kill))
    number = job.wait_until(lambda: job.full_group(1 + PLAIN_STEPS, job.workers - 1), "the survivors' next steps")
    plain = [event["ms"] for event in job.read.of("committed", round=number) if event["number"] > 0]
    recovery.plain_step_ms = plain
    return recovery
