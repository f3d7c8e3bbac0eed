"""The batch scripts of this repository, submitted as their users do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.transformer_slurm import compare_weights
from examples.transformer_slurm.checkpoint_names import SavedName
from examples.transformer_slurm.make_dataset import write_parquet
from tests.slurm.cluster import PATIENCE_S, Slurm
from tests.slurm.jobs import ROOT, SLOW_S, SOON_S, Job, assert_same
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(700)]

TRANSFORMER = ROOT / "examples" / "transformer_slurm"
TINY = [
    *("--training-steps", "2000", "--checkpoint-frequency", "2000", "--logging-frequency", "5"),
    *("--sequence-length", "12", "--batch-size", "2", "--vocabulary", "280"),
    *("--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--hidden", "32"),
    *("--default-ckpt-time", "1", "--default-iter-time", "1"),
]


def test_the_script_of_deploy_trains_on_two_nodes_beyond_the_limit(
    slurm: Slurm, uninterrupted: Job, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    program = [sys.executable, "-m", "tests.slurm.slurm_job", str(tmp_path)]
    words = [str(ROOT / "deploy" / "slurm" / "train.sbatch"), *program, f"--pause={SLOW_S}", f"--ends-in={SOON_S}"]
    job.job_id = slurm.submit("", "--time=10", "--nodes=2", "--ntasks=2", f"--chdir={ROOT}", words=words)
    job.wait_until("COMPLETED", restarts=1)
    assert slurm.facts(job.job_id)["NodeList"] == "n[1-2]"
    assert_same(job, uninterrupted)


class Transformer:
    """A run of the example, two ranks on two nodes."""

    def __init__(self, slurm: Slurm, folder: Path, name: str) -> None:
        self.slurm, self.folder, self.name = slurm, folder, name
        python = folder / "python"  # SLURM's nodes are all this host here, and their names are known to nobody
        python.write_text(f'#!/bin/sh\nMASTER_ADDR=127.0.0.1 exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        script = str(TRANSFORMER / "submit-training-simple.sh")
        words = [script, "--distributed", "--use_torch_distributed_ckpt"]
        words += [f"--exp_name={name}", f"--dataset={folder / 'text.parquet'}", "--log-loss-to-csv", "--"]
        self.job_id = slurm.submit(
            "", "--time=10", "--nodes=2", "--gpus-per-node=0", f"--chdir={folder}", TRAIN_DIR=str(TRANSFORMER),
            words=[*words, "--checkpoint-dir", str(folder), *TINY], PYTHON=str(python), PYTHONPATH=str(ROOT),
        )  # fmt: skip

    def wait_for(self, text: str) -> None:
        wait_until(
            lambda: text in self.slurm.output(self.job_id), PATIENCE_S, text, lambda: self.slurm.output(self.job_id)
        )

    def newest(self) -> Path:
        names = [SavedName.find(path.name) for path in (self.folder / self.name).iterdir()]
        return self.folder / self.name / max(name for name in names if name is not None).text


def test_the_transformer_is_requeued_before_its_limit_and_ends_with_the_same_weights(
    slurm: Slurm, tmp_path: Path
) -> None:
    texts = [f"the rank of a tensor is {number}, and the limit of the queue {number * 7 % 40}" for number in range(400)]
    write_parquet(tmp_path / "text.parquet", texts, rows_per_group=50)
    whole = Transformer(slurm, tmp_path, "whole")
    slurm.wait_until(whole.job_id, "COMPLETED")
    halves = Transformer(slurm, tmp_path, "halves")
    halves.wait_for("step 5 of")
    slurm.update(halves.job_id, EndTime="now+4")
    slurm.cancel(halves.job_id, "--signal=USR1")  # it is told to look again
    slurm.wait_until(halves.job_id, "COMPLETED", restarts=1)
    output = slurm.output(halves.job_id)
    assert "deadline: SLURM (squeue says" in output
    assert "restart 1 of at most 100" in output
    assert compare_weights.main([str(whole.newest()), str(halves.newest()), "--tolerance", "0"]) == 0
