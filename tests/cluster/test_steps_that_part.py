"""Single ranks return early, draw twice, leave out their optimizer or skip a step: no rank goes on alone, ever."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cluster.elastic_job import make_dataset, make_model
from tests.cluster.harness import Job, batch_indices
from tests.cluster.parting_job import GLOBAL_BATCH, SAMPLES, SEED
from torchelastic.data import ElasticBatchSampler
from torchelastic.testing.faults import Fault

STEPS = SAMPLES // GLOBAL_BATCH
#: What a rank does instead, and what is said of it.
PARTINGS = {
    "return": "rank 1 ended the step without a backward pass, where rank 0 averaged gradients",
    "catch": "rank 1 ended the step without a backward pass, where rank 0 averaged gradients",
    "draw again": "rank 1 drew 2 batches, and rank 0 1 batch",
    "no optimizer": "rank 1 left out optimizer.step(), which rank 0 called",
}


#: Which of them are tried beside a kill at the step before, at that step, or at the next, if not all are.
USUAL = {("return", 8), ("catch", 9), ("draw again", 7), ("no optimizer", 8), ("skip", 9)}


class PartingJob(Job):
    module = "tests.cluster.parting_job"


run = partial(PartingJob.finished, nproc=2)


def part(what: str, *, rank: int | None = 1, step: int, times: int = 1) -> Fault:
    return Fault("raise", what, rank=rank, step=step, incarnation=None, times=times)


def undisturbed(skipped: frozenset[int] = frozenset()) -> torch.Tensor:
    """The weights of one process that trains all steps but those."""
    dataset, model = make_dataset(SAMPLES), make_model(SEED, dropout=0.0)
    sampler = ElasticBatchSampler(dataset, GLOBAL_BATCH, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step not in skipped:
            inputs, targets = dataset[batch_indices(sampler, 0, step)]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def assert_ends_there(job: Job, skipped: frozenset[int] = frozenset(), finishers: int = 2) -> None:
    finals = job.final_weights()
    assert len(finals) == finishers, job.output()[-3000:]
    assert all(torch.equal(finals[0], other) for other in finals[1:]), "workers end with different weights"
    torch.testing.assert_close(finals[0], undisturbed(skipped), rtol=1e-9, atol=1e-12)
    assert {event["step"] for event in job.of("finished")} == {STEPS}
    assert not {event["step"] for event in job.of("trained")} & skipped, "a skipped step was trained"


def skips(job: Job) -> list[str]:
    return sorted(set(re.findall(r"step \d+ is skipped by rank \d+: [a-z ]+ \(\d+ samples\)", job.output())))


@pytest.mark.daily
@pytest.mark.long
def test_what_one_rank_does_otherwise_is_undone_and_named_and_what_it_skips_is_skipped_by_all(tmp_path: Path) -> None:
    faults = [part(what, step=2 + 3 * number) for number, what in enumerate(PARTINGS)]
    faults += [part("skip", rank=0, step=14, times=2), part("skip", rank=None, step=17, times=2)]
    faults += [part("evaluate", rank=0, step=0), part("evaluate", rank=0, step=1)]  # sends nothing: no difference
    job = run(tmp_path / "job", faults)
    assert_ends_there(job, skipped=frozenset({14, 17}))
    said = job.output()
    for number, what in enumerate(PARTINGS.values()):
        assert f"DifferError: step {3 + 3 * number}: {what}. A step has to do the same on every rank" in said, said
    assert len(skips(job)) == 2, said
    assert not re.search(r"DifferError: step [12]: ", said)
    assert "SIGABRT" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "killed_at"),
    [
        pytest.param(what, killed_at, marks=[] if (what, killed_at) in USUAL else [pytest.mark.slow])
        for what in (*PARTINGS, "skip")
        for killed_at in (7, 8, 9)
    ],
)
def test_beside_a_kill_of_another_worker_the_run_ends_where_an_undisturbed_one_ends(
    tmp_path: Path, what: str, killed_at: int
) -> None:
    kill = Fault("kill", "begin", rank=0, step=killed_at)
    job = run(tmp_path / "job", [part(what, step=8, times=9 if what == "skip" else 1), kill], nproc=3)
    skipped = frozenset({8}) if skips(job) else frozenset[int]()
    assert_ends_there(job, skipped, finishers=len(job.of("finished")))


@pytest.mark.long
@pytest.mark.parametrize("what", ["return", "skip"])
def test_a_newcomer_gets_the_state_of_all_after_one_has_parted(tmp_path: Path, what: str) -> None:
    kill = Fault("kill", "begin", rank=1, step=4)
    faults = [kill, part(what, rank=0, step=12, times=2 if what == "skip" else 1)]
    job = run(tmp_path / "job", faults, wait_for=2)
    assert_ends_there(job, frozenset({12}) if what == "skip" else frozenset())


@pytest.mark.long
@pytest.mark.parametrize("step", [5, STEPS - 1])
@pytest.mark.parametrize("between_halves_s", [0.0, 1.5])
@pytest.mark.parametrize("nproc", [2, 3])
def test_a_step_that_others_have_committed_with_half_of_a_ranks_gradients_does_not_count(
    tmp_path: Path, step: int, between_halves_s: float, nproc: int
) -> None:
    job = run(tmp_path / "job", [part("halves", step=step)], nproc=nproc, between_halves_s=between_halves_s)
    assert_ends_there(job, finishers=nproc)
    repeated = [event for event in job.of("trained") if event["step"] == step]
    assert len({event["round"] for event in repeated}) == 2, "nobody had committed it, so nothing was shown"
    said = "others had committed it with a part of this rank's gradients"
    assert f"step {step + 1} is taken back on all ranks and repeated: {said}" in job.output()


@pytest.mark.long
@pytest.mark.parametrize("salvage", ["discard", "recompute"])
def test_so_it_does_where_a_worker_that_has_committed_it_is_killed(tmp_path: Path, salvage: str) -> None:
    kill = Fault("kill", "begin", rank=0, step=6)
    job = run(tmp_path / "job", [part("halves", step=5), kill], nproc=3, between_halves_s=1.5, salvage=salvage)
    assert_ends_there(job, finishers=len(job.of("finished")))


@pytest.mark.long
def test_a_step_that_is_taken_back_draws_each_ranks_random_numbers_again(tmp_path: Path) -> None:
    ends = [
        run(tmp_path / name, faults, dropout=0.3).final_weights()[0]
        for name, faults in (("undisturbed", []), ("halves", [part("halves", step=5)]))
    ]
    assert torch.equal(*ends)


@pytest.mark.long
@pytest.mark.parametrize("salvage", ["discard", "recompute"])
def test_with_logical_shards_too(tmp_path: Path, salvage: str) -> None:
    faults = [part("return", step=3), part("no optimizer", step=6), part("skip", rank=0, step=9, times=2)]
    job = run(tmp_path / "job", faults, logical_shards=4, salvage=salvage)
    assert_ends_there(job, frozenset({9}))


@pytest.mark.long
def test_a_skip_after_the_gradients_were_averaged_is_refused_by_name(tmp_path: Path) -> None:
    job = run(tmp_path / "job", [part("skip late", step=5)])
    assert_ends_there(job)
    assert "rank 1 skips it (too late) after its gradients were averaged, and not every rank does" in job.output()


@pytest.mark.long
def test_a_rank_that_ends_the_run_frees_those_who_ask_it_what_it_does(tmp_path: Path) -> None:
    job = run(tmp_path / "job", [part("stop", step=0)])
    assert {event["step"] for event in job.of("finished")} == {0}
    assert "another worker has ended the run" in job.output()
