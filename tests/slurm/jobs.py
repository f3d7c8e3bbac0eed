"""Submits `slurm_job.py` and reads what it leaves."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.slurm.cluster import PATIENCE_S, POLL_S, Slurm
from tests.slurm.slurm_job import STEPS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: Seconds per step of a run that is to be stopped: more than it is given, so it never finishes by itself.
SLOW_S = 0.2
#: When the first run of a job ends, from its first step: SLURM's limits are whole minutes, but `scontrol update` moves
#: the end of a running job to any second.
SOON_S = 10


@dataclass
class Job:
    """A job, and the folder into which it writes.

    Args:
        slurm: where it runs.
        folder: its own.
        job_id: once it is submitted.
    """

    slurm: Slurm
    folder: Path
    job_id: str = ""

    def submit(
        self,
        *options: str,
        ends_in_s: int | str | None = SOON_S,
        pause_s: float | str = SLOW_S,
        by: str = "requeue_job",
        then: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Submit it: two ranks, unless the options say something else.

        Args:
            options: of sbatch.
            ends_in_s: the end of its first run, from its first step; None: the limit that it has from sbatch.
                This and the next may be shell expressions.
            pause_s: after each step of its first run.
            by: who requeues it, "requeue_job" or "" for nobody.
            then: lines of the batch script after training; `$code` is the exit code.
            variables: of its environment.
        """
        words = [sys.executable, "-m", "tests.slurm.slurm_job", str(self.folder)]
        if by == "requeue_job":
            words.append("--requeue")
        end = "" if ends_in_s is None else f"--ends-in {ends_in_s}"
        script = f"""
            cd {shlex.quote(str(ROOT))}
            job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
            if [ -n "$SLURM_RESTART_COUNT" ]; then scontrol update JobId=$job TimeLimit=10; fi
            srun {shlex.join(words)} --pause {pause_s} {end} &
            wait $!; code=$?; echo "run ${{SLURM_RESTART_COUNT:-0}} ended with $code"
            {then}
            exit $code
        """
        options = ("--time=10", "--ntasks=2", *options)
        self.job_id = self.slurm.submit(script, *options, PYTHONUNBUFFERED="1", **(variables or {}))

    def wait_until(self, *states: str, restarts: int = 0, within_s: float = PATIENCE_S) -> str:
        return self.slurm.wait_until(self.job_id, *states, restarts=restarts, within_s=within_s)

    def wait_until_gone(self) -> None:
        """Wait until no process of it is left: SLURM calls a job CANCELLED while it still has its grace."""
        wait_until(lambda: self.slurm.is_gone(self.job_id), PATIENCE_S, "it is gone", self.output, every_s=POLL_S)

    def wait_for_steps(self, steps: int) -> None:
        """Wait until rank 0 has trained so many."""
        wait_until(lambda: len(self.ledger(0)) >= steps, PATIENCE_S, f"{steps} steps", self.output)

    def output(self) -> str:
        return self.slurm.output(self.job_id)

    def ledger(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has trained, in all runs, in the order in which it did."""
        path = self.folder / f"ledger-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trained(self, rank: int) -> list[tuple[int, list[int], str]]:
        """The steps with their samples and losses, whatever run they were in."""
        return [(line["step"], line["samples"], line["loss"]) for line in self.ledger(rank)]

    def runs(self) -> set[int]:
        """In which runs of the job something was trained."""
        return {line["run"] for line in self.ledger(0)}

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the trained model; there are none if no run has finished."""
        weights: dict[str, torch.Tensor] = torch.load(self.folder / "final.pt")
        return weights


def assert_same(job: Job, uninterrupted: Job, ranks: int = 2) -> None:
    """No step is missing, none was trained twice, and losses and weights are the same to the bit."""
    for rank in range(ranks):
        assert [line["step"] for line in job.ledger(rank)] == list(range(1, STEPS + 1)), job.output()
        assert job.trained(rank) == uninterrupted.trained(rank)
    weights, expected = job.weights(), uninterrupted.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
