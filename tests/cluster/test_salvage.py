"""A step in which a worker is lost is salvaged: what the survivors have computed counts, and every sample once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job, run_standalone
from torchelastic.testing.faults import Fault

#: Dropout, batches that no number of workers divides evenly, and a last one with fewer samples than there are shards.
SHARDED: dict[str, Any] = {"seed": 5, "dropout": 0.2, "epochs": 2, "samples": 124, "logical_shards": 8}


def assert_all_struck(job: Job, faults: Sequence[Fault]) -> None:
    assert job.plan.struck() == list(range(len(faults))), f"not every fault struck:\n{job.output()[-3000:]}"


def counted(job: Job, step: int, round_number: int, what: str = "indices") -> dict[int, list[int]]:
    """What each rank computed (or brought) of a step in one round."""
    return {event["rank"]: event[what] for event in job.of("drawn", step=step, round=round_number)}


@pytest.mark.long
def test_drop_commits_what_is_there_and_trains_the_rest_later_in_the_epoch(jobs: MakeJob) -> None:
    faults = [Fault("kill", "backward", rank=1, step=5), Fault("kill", "backward", rank=0, step=26, incarnation=None)]
    job = run_standalone(jobs(faults, salvage="drop", wait_for_newcomer_at=[15]), nproc=3)
    assert_all_struck(job, faults)
    job.check_identity()
    lost = counted(job, 5, 1)[1]
    later = [event for event in job.of("drawn") if event["epoch"] == 0 and event["step"] >= 10]
    assert sorted(index for event in later for index in event["indices"]) == sorted(lost), "a batch of its own"
    assert all(not indices for indices in counted(job, 5, 2).values()), "nothing was computed again"
    assert len(job.of("committed")) > 0
    assert "4 count later in the epoch" in job.output()


@pytest.mark.long
@pytest.mark.daily
def test_recompute_deals_the_lost_samples_out_and_ends_where_an_undisturbed_run_ends(jobs: MakeJob) -> None:
    faults = [
        Fault("kill", "backward", rank=1, step=5),
        # the attempt at saving the step fails too: what was kept of the first one still counts
        Fault("kill", "backward", rank=0, step=26, incarnation=None),
        Fault("raise", "backward", rank=0, step=26, incarnation=None),
    ]
    job = run_standalone(jobs(faults, salvage="recompute", wait_for_newcomer_at=[15, 32]), nproc=3)
    assert_all_struck(job, faults)
    job.check_identity(finishers=3)
    lost = counted(job, 5, 1)[1]
    again = counted(job, 5, 2)
    assert sorted(index for indices in again.values() for index in indices) == sorted(lost), "only the lost ones"
    assert {len(indices) for indices in again.values()} == {2}, "dealt out evenly"


@pytest.mark.long
def test_what_is_lost_of_an_epochs_small_last_batch_is_computed_again(jobs: MakeJob) -> None:
    kill = Fault("kill", "backward", rank=1, step=4)
    job = run_standalone(jobs([kill], salvage="recompute", samples=52), nproc=3)
    assert_all_struck(job, [kill])
    before = counted(job, 4, 1)
    assert sum(map(len, before.values())) == 4, "of batches of 12"
    again = counted(job, 4, 2)
    assert sorted(index for indices in again.values() for index in indices) == sorted(before[1]) != []
    job.check_identity()


@pytest.mark.long
@pytest.mark.parametrize(("salvage", "step"), [("discard", 12), ("recompute", 11), ("recompute", 12), ("drop", 13)])
def test_no_worker_has_to_normalize_one_sample_whoever_is_lost(jobs: MakeJob, salvage: str, step: int) -> None:
    """Global batches of 4, and of 2 at step 12, the last of an epoch, for two to three workers and a BatchNorm."""
    faults = [
        Fault("kill", "backward", rank=0, step=step),
        Fault("kill", "backward", rank=1, step=21, incarnation=None),
    ]
    job = jobs(faults, salvage=salvage, batchnorm=True, samples=50, batch=4, epochs=2, wait_for_newcomer_at=[18, 24])
    assert_all_struck(run_standalone(job, nproc=3), faults)
    job.check_identity(finishers=3)
    sizes = {len(event["indices"]) for event in job.of("drawn")}
    assert min(sizes - {0}) >= 2
    assert "cannot normalize" not in job.output()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The final weights of a single worker whom nothing happened."""
    return run_standalone(Job(tmp_path_factory.mktemp("alone"), **SHARDED), nproc=1).final_weights()[0]


@pytest.mark.long
@pytest.mark.parametrize("salvage", ["recompute", pytest.param("discard", marks=pytest.mark.slow)])
def test_with_logical_shards_three_workers_that_are_killed_end_with_the_bits_of_one(
    jobs: MakeJob, alone: torch.Tensor, salvage: str
) -> None:
    faults = [
        Fault("kill", "backward", rank=1, step=5),
        Fault("kill", "optimizer", rank=2, step=12, incarnation=None),
        Fault("raise", "backward", rank=0, step=16, incarnation=None),
    ]
    job = run_standalone(jobs(faults, **SHARDED, salvage=salvage, wait_for_newcomer_at=[9, 15]), nproc=3)
    assert_all_struck(job, faults)
    assert {event["world"] for event in job.of("drawn")} == {2, 3}
    job.check_ledger()
    finals = job.final_weights()
    assert len(finals) == 3
    for final in finals:
        assert torch.equal(final, alone), f"off by {(final - alone).abs().max()}"
    computed_again = sum(len(event["indices"]) for event in job.of("drawn", step=5, round=2))
    assert computed_again < 12 if salvage == "recompute" else computed_again == 12


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_with_logical_shards_any_number_of_workers_ends_with_the_same_bits(
    jobs: MakeJob, alone: torch.Tensor, nproc: int
) -> None:
    for final in run_standalone(jobs(**SHARDED), nproc=nproc).final_weights():
        assert torch.equal(final, alone)


@pytest.mark.slow
def test_a_spare_helps_with_what_was_lost_at_the_very_step_of_the_loss(jobs: MakeJob) -> None:
    kill = Fault("kill", "backward", rank=1, step=5)
    job = jobs([kill], salvage="recompute", gates=[3, 30])
    job.start("--standalone", "--max-workers=2", nproc=3)
    job.wait_for("asking", count=3)
    job.open_gate(3)
    job.wait_for("asking", count=5, timeout_s=60)  # three at the start, the survivor, and the killed one, a spare now
    job.open_gate(30)
    assert job.wait() == [0], job.output()[-4000:]
    assert_all_struck(job, [kill])
    job.check_identity(finishers=2)
    lost = counted(job, 5, 1)[1]
    again = counted(job, 5, 2)
    assert {len(indices) for indices in again.values()} == {3}, "the spare and the survivor, half of it each"
    assert sorted(index for indices in again.values() for index in indices) == sorted(lost)
    assert sum(1 for brought in counted(job, 5, 2, "carried").values() if brought) == 1
