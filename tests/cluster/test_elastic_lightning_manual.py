"""A GAN of Lightning, and others with manual optimization, that lose workers or get them back: as if undisturbed."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.cluster.harness import Job
from tests.cluster.test_elastic_lightning import ALONE, assert_like, samples_of
from torchelastic.testing.faults import Fault

pytest.importorskip("lightning", reason="the adapter for Lightning is needed: pip install 'torchelastic[lightning]'")

pytestmark = pytest.mark.timeout(300)  # two runs in most of them
#: Of an epoch: 46 samples, five in each, and one in the last.
BATCHES = 10


class ManualJob(Job):
    module = "tests.cluster.lightning_manual_job"


def run(folder: Path, faults: list[Fault], *launcher: str, nproc: int = 2, **options: object) -> ManualJob:
    return ManualJob.finished(folder, faults, *launcher, nproc=nproc, **options)


@cache
def alone(model: str) -> Job:
    """One worker, which does what Lightning does: see the tests of one process."""
    return run(Path(tempfile.mkdtemp()), [], nproc=1, model=model)


def assert_ends_like(job: Job, other: Job) -> None:
    finals = job.final_weights()
    assert len(finals) == 2, job.output()[-3000:]
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    assert samples_of(job) == samples_of(other)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "between", "stepped", "batch end"])
def test_a_worker_is_killed_in_the_middle_of_a_gans_step(tmp_path: Path, phase: str) -> None:
    job = run(tmp_path / "job", [Fault("kill", phase, rank=1, step=12)], *ALONE, model="gan")
    assert_like(job, alone("gan"), finishers=1)
    assert job.of("finished")[0]["step"] == 2 * 3 * BATCHES, "each step of both optimizers counts"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "phase", "rank"),
    [
        ("accumulating", "backward", 0),  # batch 14 is the second of three whose gradients add up
        ("wasserstein", "between", 0),
        ("wasserstein", "stepped", 1),
        ("actor-critic", "between", 1),
        ("actor-critic", "batch end", 0),
    ],
)
def test_so_it_is_with_other_ways_to_step(tmp_path: Path, model: str, phase: str, rank: int) -> None:
    job = run(tmp_path / "job", [Fault("kill", phase, rank=rank, step=14)], *ALONE, model=model)
    assert_like(job, alone(model), finishers=1)


@pytest.mark.long
@pytest.mark.parametrize("model", ["gan", "accumulating", "actor-critic"])
def test_a_worker_joins_between_batches(tmp_path: Path, model: str) -> None:
    """Where gradients are left from one batch to the next, the one that joins has them too."""
    faults = [Fault("kill", "backward" if model == "accumulating" else "between", rank=1, step=14)]
    job = run(tmp_path / "job", faults, wait_for=2, step_s=0.05, model=model)
    assert_like(job, alone(model), finishers=2)


@pytest.mark.long
@pytest.mark.parametrize("average", ["lightning", "shadow", "module"])
def test_an_average_of_the_weights_is_a_part_of_the_state(tmp_path: Path, average: str) -> None:
    """Undone where a worker is lost behind its update, and sent to the one that takes its place."""
    kill = Fault("kill", "batch end", rank=1, step=14)
    job = run(tmp_path / "job", [kill], wait_for=2, step_s=0.05, model="gan", average=average)
    assert_like(job, run(tmp_path / "alone", [], nproc=1, model="gan", average=average), finishers=2)


@pytest.mark.long
def test_each_batch_begins_with_the_buffers_of_rank_0(tmp_path: Path) -> None:
    """So a worker that joins, which has got them, goes on as the one that was lost would have."""
    kill = Fault("kill", "backward", rank=1, step=12)
    job = run(tmp_path / "job", [kill], wait_for=2, step_s=0.05, model="centered")
    assert_like(job, run(tmp_path / "undisturbed", [], model="centered"), finishers=2)


@pytest.mark.long
def test_a_gan_resumes_from_lightnings_own_checkpoint(tmp_path: Path) -> None:
    faults = [Fault("kill", "between", worker=worker, step=2 * BATCHES + 4) for worker in range(2)]
    job = run(tmp_path / "job", faults, resume=True, model="gan")
    assert_ends_like(job, alone("gan"))
    again = [event["step"] for event in job.of("batch") if event["incarnation"] > 0]
    assert min(again) == 2 * (BATCHES + 1), "behind the first epoch, whose validation was the best one"


@pytest.mark.long
def test_all_at_once_go_on_from_memory_with_the_gradients_that_were_left(tmp_path: Path) -> None:
    memory = tempfile.mkdtemp(dir="/dev/shm")
    try:
        faults = [Fault("kill", "backward", worker=worker, step=14) for worker in range(2)]
        job = run(tmp_path / "job", faults, memory=memory, model="accumulating")
    finally:
        shutil.rmtree(memory)
    assert_ends_like(job, alone("accumulating"))
    assert "are in no checkpoint" not in job.output()


@pytest.mark.long
def test_a_scaler_is_undone_with_the_first_of_two_optimizers(tmp_path: Path) -> None:
    kill = Fault("kill", "between", rank=1, step=12)
    ends = [
        run(tmp_path / name, faults, *launcher, scaled=True, model="gan").final_weights()[0]
        for name, faults, launcher in (("undisturbed", [], ()), ("killed", [kill], ALONE))
    ]
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-2, atol=2e-2)
