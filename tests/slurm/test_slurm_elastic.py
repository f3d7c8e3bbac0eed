"""`torchelastic run` under srun: one launcher on each node, an etcd outside of the job, `train(lifetime=)`."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.harness import ROOT, Job, run_standalone
from tests.slurm.cluster import Slurm
from torchelastic.rendezvous.server import EtcdServer

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(500)]

OPTIONS: dict[str, Any] = {"seed": 5, "epochs": 8, "checkpoint_every": 10_000, "lifetime": 2.0}
#: Only the first run is slow, and is stopped.
STEP_MS = '$([ -z "$SLURM_RESTART_COUNT" ] && echo 1000 || echo 1)'


def test_an_elastic_run_on_two_nodes_is_requeued_before_its_limit_and_ends_with_the_same_weights(
    slurm: Slurm, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    for name in ("undisturbed", "job"):
        (tmp_path / name).mkdir()
    undisturbed = Job(tmp_path / "undisturbed", seed=5, epochs=8, step_ms=1.0)
    expected = run_standalone(undisturbed, nproc=2).check_identity(finishers=2)
    job = Job(tmp_path / "job", checkpoint_dir=tmp_path / "saved", **OPTIONS)
    words = [sys.executable, "-m", "torchelastic.launch", "run", "--nnodes=2", "--nproc-per-node=1"]
    words += [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", str(job.script), *job.job_arguments()]
    script = f"""
        if [ -n "$SLURM_RESTART_COUNT" ]; then scontrol update JobId=$SLURM_JOB_ID TimeLimit=10; fi
        srun {shlex.join(words)} --step-ms={STEP_MS}
    """
    job_id = slurm.submit(script, "--time=1", "--nodes=2", "--ntasks-per-node=1", f"--chdir={ROOT}")
    slurm.wait_until(job_id, "COMPLETED", restarts=1)
    assert slurm.restarts(job_id) == 1
    assert slurm.output(job_id).count("before the deadline; saved in durable") == 2
    assert set(Counter(event["step"] for event in job.of("committed")).values()) == {2}, "by two workers, each once"
    assert torch.equal(job.check_identity(finishers=2), expected)
