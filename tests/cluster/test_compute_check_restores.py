"""A worker computes wrong, and what was trained since the last check with it is trained again: `on_wrong="restore"`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.compute_check_job import GLOBAL_BATCH, SAMPLES
from tests.cluster.test_compute_check import CheckJob
from torchelastic.testing.faults import Fault

STEPS = 2 * SAMPLES // GLOBAL_BATCH
#: Checks are rare, so what is wrong from step 12 on is committed for some steps.
RARELY: dict[str, Any] = {"logical_shards": 6, "dropout": 0.2, "every": 5, "epochs": 2}
GOES_BACK = re.compile(r"ERROR.*it leaves the run, and the run goes back to a checkpoint of at most (\d+) steps")


def restored(folder: Path, faults: list[Fault], *, nproc: int, **options: Any) -> CheckJob:
    """The job, which has committed wrong steps and trained them again."""
    options = {**RARELY, "wrong_at": "gradient", "wrong_from": 12, "saves_every": 1, **options}
    job = CheckJob.finished(folder / "job", faults, nproc=nproc, on_wrong="restore", **options)
    assert {event["step"] for event in job.of("flipped")} > {12, 13}, "nothing wrong was committed"
    (at_most,) = map(int, GOES_BACK.findall(job.output()))
    assert at_most <= 12
    return job


def ends_as_undisturbed(job: CheckJob, folder: Path, least: int) -> None:
    """Whoever ends; one that was started again late may have come too late."""
    finals = job.final_weights()
    assert len(finals) >= least, job.output()[-4000:]
    assert {event["step"] for event in job.of("finished")} == {STEPS}
    expected = CheckJob.finished(folder / "undisturbed", [], nproc=1, **RARELY).final_weights()[0]
    assert all(torch.equal(final, expected) for final in finals), "something wrong is still in the weights"


@pytest.mark.long
def test_the_run_goes_back_in_the_same_processes_and_ends_as_if_nothing_had_been_wrong(tmp_path: Path) -> None:
    job = restored(tmp_path, [], nproc=3)
    ends_as_undisturbed(job, tmp_path, 2)
    assert {event["restart"] for event in job.of("started")} == {0}, "a process was started again"
    trained = [event["step"] for event in job.of("trained")]
    assert trained.count(13) > 3, "no step was trained again"


@pytest.mark.long
def test_a_worker_that_is_lost_while_the_run_goes_back_costs_nothing(tmp_path: Path) -> None:
    job = restored(tmp_path, [], nproc=4, dies_when_back="rank 1, in the sync")
    assert job.of("went back"), "no worker was lost"
    ends_as_undisturbed(job, tmp_path, 2)


@pytest.mark.long
def test_a_newcomer_beside_it_gets_what_was_restored(tmp_path: Path) -> None:
    job = restored(tmp_path, [Fault("kill", "begin", rank=2, step=14)], nproc=4, wait_for=4)
    assert [event for event in job.of("started") if event["restart"]], "no worker was lost"
    ends_as_undisturbed(job, tmp_path, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "dies"), [(3, "all, in the next step"), (4, "rank 1, in the sync, and all, in the next step")]
)
def test_what_was_wrong_is_not_loaded_by_those_that_are_started_again(tmp_path: Path, nproc: int, dies: str) -> None:
    job = restored(tmp_path, [], nproc=nproc, dies_when_back=dies)
    assert len(job.of("went back")) == nproc - 1
    began = [event["step"] for event in job.of("trained") if event["round"] >= nproc]
    assert min(began) <= 13, "what was wrong was loaded"
    ends_as_undisturbed(job, tmp_path, 2)


@pytest.mark.long
def test_without_a_checkpoint_that_is_old_enough_the_run_ends_and_says_why(tmp_path: Path) -> None:
    # weights that part between two checks are found by the digests of replicas
    options = {"wrong_at": "weight", "times": 1, "every": 10_000, "epochs": 10, "saves_every": 7}
    job = CheckJob(tmp_path / "job", [], on_wrong="restore", **options)
    try:
        job.start("--standalone", nproc=3)
        assert job.wait() == [1]
    finally:
        job.stop()
    assert "there is no checkpoint of at most 1 steps to go back to, so weights may be wrong" in job.output()
    assert {event["restart"] for event in job.of("started")} == {0}, "it was started again"
    assert not job.of("finished")
