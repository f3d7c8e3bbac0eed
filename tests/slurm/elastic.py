"""Submits `elastic_job.py` by deploy/slurm/elastic.sbatch to a SLURM of hosts, and reads what it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.harness import ROOT, Job
from tests.slurm.cluster import PATIENCE_S
from tests.slurm.hosts import SlurmHosts

SCRIPT = ROOT / "deploy" / "slurm" / "elastic.sbatch"


class ElasticJob(Job):
    """One run, possibly of several jobs of SLURM.

    Args:
        slurm: where they run.
        folder: for all that they write.
        launcher: words for `torchelastic run`.
        options: of the training job.
    """

    def __init__(self, slurm: SlurmHosts, folder: Path, *launcher: str, **options: Any) -> None:
        super().__init__(folder / "job", seed=5, **options)
        self.slurm, self.launcher, self.runs_folder = slurm, launcher, folder / "runs"
        self.ids: list[str] = []

    def submit(self, nodes: Sequence[str], **variables: str) -> str:
        """Submit one job for these nodes; returns its id."""
        words: list[str | Path] = [SCRIPT, "--ttl=3", *self.launcher, self.script, *self.job_arguments()]
        options = ["--time=20", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--chdir={ROOT}"]
        options.append("--ntasks-per-node=2")  # of a user's own scripts: a node has one launcher all the same
        settings = {"PYTHON": sys.executable, "RUNS": str(self.runs_folder), "RES_OPTIONS": "timeout:1 attempts:1"}
        job_id = self.slurm.submit("", *options, words=words, **{**settings, "WATCH_S": "1", **variables})
        self.ids.append(job_id)
        return job_id

    def output(self) -> str:
        return "".join(self.slurm.output(job_id) for job_id in self.ids)

    def is_asked_to_stop(self) -> bool:
        """Whether the run's etcd answers, and says that its workers are asked to stop."""
        (rendezvous,) = self.runs_folder.glob("*/rendezvous")
        name, port = rendezvous.read_text().split()[0].split(":")
        host = self.slurm.lab[name]
        where = [f"--rdzv-endpoint={host.address}:{port}", f"--rdzv-id={rendezvous.parent.name}"]
        try:
            told = host.run(sys.executable, "-m", "torchelastic.launch", "status", "--json", *where)
        except RuntimeError:
            return False  # it is out of reach
        return bool(json.loads(told)["round"]["state"] == "gathering")

    def wait_for_end(self, job_id: str = "", restarts: int = 0) -> None:
        """Wait until a job, the first of all by default, is COMPLETED; it must have been requeued so often."""
        job_id = job_id or self.ids[0]
        self.slurm.wait_until(job_id, "COMPLETED", restarts=restarts, within_s=PATIENCE_S)
        assert self.slurm.restarts(job_id) == restarts, self.output()
