"""Sharded models in real runs: workers are killed, drained and join; the result is that of one undisturbed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.cluster.elastic_job import make_dataset
from tests.cluster.harness import Job, batch_indices
from tests.cluster.sharded_job import SEED, WIDTH, as_list, optimizers, plain_model
from tests.older_torch import needs_fsdp2_on_cpus
from torchelastic.data import ElasticBatchSampler
from torchelastic.testing.faults import Fault

pytestmark = [pytest.mark.timeout(400), needs_fsdp2_on_cpus]
#: A run of FSDP2 costs 20 s of processor time: of each sort CI has one or two.
SLOW = pytest.mark.slow

SAMPLES, BATCH, EPOCHS = 120, 12, 2
STEPS = EPOCHS * SAMPLES // BATCH


class ShardedJob(Job):
    """A run of the sharded job."""

    module = "tests.cluster.sharded_job"

    def run(self, nproc: int = 3, *launcher: str) -> None:
        """Run it to its end on this host alone."""
        self.start("--standalone", "--min-workers=1", *launcher, nproc=nproc)
        assert self.wait(240) == [0], self.output()[-6000:]

    def check(self, first_step: int = 0) -> None:
        """Each sample has counted in its step, and the weights are those of one process that nothing has disturbed."""
        assert self.plan.struck() == list(range(len(self.faults))), "a fault did not happen"
        committed: dict[int, int] = {}
        for event in self.of("committed"):
            committed[event["step"]] = max(event["round"], committed.get(event["step"], 0))
        drawn: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        for event in self.of("drawn"):
            drawn[event["step"], event["round"]][event["rank"]] = event
        for event in self.of("synced"):  # a step of which all optimizers were done when the group ended stands so
            rounds = [round_number for step, round_number in drawn if step == event["step"] - 1]
            committed |= {event["step"] - 1: max(rounds)} if rounds and event["step"] - 1 not in committed else {}
        assert sorted(committed) == list(range(first_step, STEPS)), f"steps committed: {sorted(committed)}"
        sampler = ElasticBatchSampler(SAMPLES, BATCH, epochs=EPOCHS, seed=3)
        for step, round_number in committed.items():
            shares = drawn[step, round_number]
            assert sorted(shares) == list(range(next(iter(shares.values()))["world"])), f"step {step}: {sorted(shares)}"
            same = int(self.job_options.get("tensor_parallel", 1))  # ranks with the same samples
            indices = sorted(index for rank in sorted(shares)[::same] for index in shares[rank]["indices"])
            epoch, number = divmod(step, sampler.batches_per_epoch)
            assert indices == sorted(batch_indices(sampler, epoch, number)), f"step {step}: samples lost or repeated"
        finals = self.final_weights()
        assert finals, self.output()[-3000:]
        assert all(torch.equal(finals[0], other) for other in finals), "workers end with different weights"
        # of a step that failed behind all optimizers before any rank had ended it, what follows them is not repeated
        ended = {(event["step"], event["round"]) for event in self.of("loss")}
        kept = {step for step, round_number in committed.items() if (step, round_number) not in ended}
        raised = {fault.step for fault in self.faults if (fault.verb, fault.phase) == ("raise", "optimizer")}
        assert kept <= raised, f"steps that no rank has ended: {sorted(kept)}"
        torch.testing.assert_close(finals[0], self.reference_weights(kept), rtol=1e-9, atol=1e-11)
        seen = EPOCHS * SAMPLES - len(kept) * BATCH
        assert {event["seen"] for event in self.of("finished") if event["rank"] >= 0} == {seen}

    def lost_steps(self) -> int:
        """How many committed steps were computed again."""
        commits: dict[int, set[int]] = defaultdict(set)
        for event in self.of("committed"):
            commits[event["step"]].add(event["round"])
        return sum(len(rounds) - 1 for rounds in commits.values())

    def restarted_from(self) -> int:
        """The first step of the last group."""
        last = max(event["round"] for event in self.of("committed"))
        return int(min(event["step"] for event in self.of("committed", round=last)))

    @property
    def faults(self) -> list[Fault]:
        return self.plan._faults

    def reference_weights(self, without_end: Collection[int] = ()) -> torch.Tensor:
        """What one process computes; in some steps its schedulers do not step."""
        model = plain_model(int(self.job_options.get("width", WIDTH))).to(self.device)
        torch.manual_seed(SEED)
        for layer in model:
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        made, schedulers = optimizers(str(self.job_options.get("optimizer", "adamw")), list(model.parameters()))
        sampler = ElasticBatchSampler(SAMPLES, BATCH, epochs=EPOCHS, seed=3)
        inputs, targets = (tensor.to(self.device) for tensor in make_dataset(SAMPLES).tensors)
        for step in range(STEPS):
            chosen = batch_indices(sampler, *divmod(step, sampler.batches_per_epoch))
            loss = torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            for optimizer in as_list(made):
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in as_list(schedulers) if step not in without_end else ():
                scheduler.step()
        return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


@pytest.fixture
def jobs() -> Iterator[list[ShardedJob]]:
    made: list[ShardedJob] = []
    yield made
    for job in made:
        job.stop()


def start(jobs: list[ShardedJob], folder: Path, *faults: Fault, **options: Any) -> ShardedJob:
    jobs.append(ShardedJob(folder, faults, **options))
    return jobs[-1]


@pytest.mark.long
def test_an_undisturbed_run_is_that_of_one_process(jobs: list[ShardedJob], tmp_path: Path) -> None:
    job = start(jobs, tmp_path)
    job.run()
    job.check()
    assert set(job.rounds().values()) == {3}


def pairs(daily: tuple[str, ...], *others: tuple[str, ...]) -> pytest.MarkDecorator:
    """Phases of steps in which a run loses a rank, one after the other; the last ones only in `make test-all`."""
    marks = [*(pytest.mark.long for _ in others[1:]), SLOW]
    runs = [daily, *(pytest.param(phases, marks=mark) for phases, mark in zip(others, marks, strict=True))]
    return pytest.mark.parametrize("phases", runs, ids="-".join)


@pairs(("forward", "optimizer"), ("step", "backward"), ("drawn", "tail"), ("copying", "copied"))
def test_what_a_killed_rank_held_comes_from_its_copy(
    jobs: list[ShardedJob], tmp_path: Path, phases: tuple[str, ...]
) -> None:
    """Rank 1 is killed in one phase of a step, and in another one later, where a newcomer is among the ranks."""
    faults = [Fault("kill", phase, rank=1, step=4 + 7 * n, incarnation=None) for n, phase in enumerate(phases)]
    job = start(jobs, tmp_path, *faults, wait_for_newcomer_at=[8, 15])
    job.run()
    job.check()
    worlds = [world for _, world in sorted(job.rounds().items())]
    assert worlds == [3, 2, 3, 2, 3]
    assert job.lost_steps() <= 4, "with every=1 at most the step whose copy was on its way, and the one before"


@pytest.mark.long
@pytest.mark.parametrize("phase", ["moving", *(pytest.param(one, marks=SLOW) for one in ("moved", "build")), "sync"])
def test_a_rank_that_dies_while_parts_move(jobs: list[ShardedJob], tmp_path: Path, phase: str) -> None:
    """Rank 1 is killed in a step, and the next rank 1 while the others get their new parts."""
    faults = [
        Fault("kill", "drawn", rank=1, step=6),
        Fault("kill", phase, rank=1 if phase != "build" else None, step=6),
    ]
    if phase == "build":
        faults[1] = Fault("kill", "build-again")
    job = start(jobs, tmp_path, *faults, replicas=2, wait_for_newcomer_at=[12, 14], full_world=4)
    job.run(4)
    job.check()
    assert max(job.rounds().values()) == 4


@pytest.mark.long
def test_two_at_once_with_two_copies(jobs: list[ShardedJob], tmp_path: Path) -> None:
    job = start(jobs, tmp_path, replicas=2, every=3, gates=[7], wait_for_newcomer_at=[12], full_world=4)
    job.start("--standalone", "--min-workers=1", nproc=4)
    job.wait_for("held", 4, step=7)
    for worker in (1, 2):
        job.kill_worker(worker)
    job.open_gate(7)
    assert job.wait(240) == [0], job.output()[-6000:]
    job.check()
    assert min(job.rounds().values()) == 2
    assert job.lost_steps() <= 4


@pytest.mark.long
def test_each_rank_in_turn_with_groups_of_four_three_two_and_four(jobs: list[ShardedJob], tmp_path: Path) -> None:
    faults = [
        Fault("kill", "backward", rank=0, step=5),
        Fault("kill", "optimizer", rank=2, step=6),
        Fault("kill", "drawn", rank=3, step=16, incarnation=None),
        Fault("kill", "forward", rank=1, step=17, incarnation=None),
    ]
    # the two that are started again may come one after the other: each is waited for
    job = start(jobs, tmp_path, *faults, wait_for_newcomer_at=[11, 13], full_world=4)
    job.run(4, "--max-restarts=4")
    job.check()
    worlds = [world for _, world in sorted(job.rounds().items())]
    assert worlds[:3] == [4, 3, 2]
    assert 4 in worlds[3:], worlds
    assert job.lost_steps() <= 2 * len(faults)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=SLOW), "two"])
def test_other_optimizers(jobs: list[ShardedJob], tmp_path: Path, optimizer: str) -> None:
    faults = [Fault("kill", "optimizer", rank=0, step=6), Fault("raise", "backward", rank=1, step=9)]
    job = start(jobs, tmp_path, *faults, optimizer=optimizer)
    job.run()
    job.check()


@pytest.mark.long
def test_a_failed_step_that_has_changed_weights_itself_goes_on_from_the_copies(
    jobs: list[ShardedJob], tmp_path: Path
) -> None:
    faults = [Fault("raise", "perturbed", rank=1, step=4), Fault("kill", "perturbed", rank=2, step=9)]
    job = start(jobs, tmp_path, *faults, perturbs=True)
    job.run()
    job.check()


@pytest.mark.long
def test_a_step_that_fails_without_a_loss_loses_nothing(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """Each phase on two ranks. What fails in "optimizer" has stepped already: the others complete it, and it stands."""
    cases = [(phase, rank) for phase in ("step", "forward", "backward", "optimizer", "tail") for rank in (1, 0)]
    faults = [Fault("raise", phase, rank=rank, step=1 + 2 * n) for n, (phase, rank) in enumerate(cases)]
    job = start(jobs, tmp_path, *faults)
    job.run()
    job.check()
    assert job.lost_steps() == 0


@pytest.mark.long
def test_a_drained_worker_costs_no_step(jobs: list[ShardedJob], tmp_path: Path) -> None:
    job = start(jobs, tmp_path, gates=[5])
    job.start("--standalone", "--min-workers=1", nproc=3)
    job.wait_for("held", 3, step=5)
    job.kill_worker(1, signal.SIGTERM)
    job.open_gate(5)
    assert job.wait(240) == [0], job.output()[-6000:]
    job.check()
    assert job.lost_steps() == 0
    assert [world for _, world in sorted(job.rounds().items())] == [3, 2]


@pytest.mark.long
def test_a_worker_that_joins_costs_no_step(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """One of three ends before the first step: the others begin, and it comes back."""
    job = start(jobs, tmp_path, Fault("exit", "sync", worker=2, step=0), wait_for_newcomer_at=[6])
    job.run()
    job.check()
    assert job.lost_steps() == 0
    assert [world for _, world in sorted(job.rounds().items())] == [2, 3]


def kill_a_rank_and_its_partner(job: ShardedJob, step: int) -> None:
    """Of the ranks of one host each has its copy on the next one."""
    held = {event["rank"]: event for event in job.wait_for("held", 4, step=step)}
    for rank in (1, 2):
        os.kill(int(held[rank]["pid"]), signal.SIGKILL)
    job.open_gate(step)


@pytest.mark.long
def test_where_every_copy_is_lost_too_a_checkpoint_is_loaded(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """With one copy, a rank and its partner at once: each of the others reads a share of the checkpoint."""
    job = start(jobs, tmp_path / "run", gates=[9], checkpoint_dir=tmp_path / "saved", checkpoint_every=4)
    job.start("--standalone", "--min-workers=1", nproc=4)
    kill_a_rank_and_its_partner(job, 9)
    assert job.wait(240) == [0], job.output()[-6000:]
    job.check()
    loaded = job.of("loaded", step=8)
    assert {event["worker"] for event in loaded} == {event["worker"] for event in job.of("rolled_back", round=1)}
    assert job.lost_steps() == 1


@pytest.mark.long
def test_without_a_checkpoint_the_error_names_what_is_missing(jobs: list[ShardedJob], tmp_path: Path) -> None:
    job = start(jobs, tmp_path, gates=[9])
    job.start("--standalone", "--min-workers=1", "--max-restarts=0", nproc=4)
    kill_a_rank_and_its_partner(job, 9)
    assert job.wait(240) != [0]
    assert "no surviving worker holds module/" in job.output()
    assert "more workers were lost at once than there were replicas" in job.output()


@pytest.mark.long
def test_another_run_goes_on_from_the_checkpoint_with_other_workers(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """Four workers stop half-way, two go on; none reads more than about its share."""
    first = start(jobs, tmp_path / "first", checkpoint_dir=tmp_path / "saved", stop_at=10)
    first.run(4)
    second = start(jobs, tmp_path / "second", checkpoint_dir=tmp_path / "saved")
    second.run(2)
    second.check(first_step=8)
    loaded = second.of("loaded", step=8)
    assert len(loaded) == 2
    assert max(event["bytes"] for event in loaded) < 0.8 * sum(event["bytes"] for event in loaded)
    target = tmp_path / "dcp"
    command = [sys.executable, "-m", "torchelastic.launch", "checkpoint", "convert", "--to", "dcp"]
    subprocess.run([*command, str(tmp_path / "saved"), str(target)], check=True, timeout=120)
    whole = {f"module.{name}": torch.empty_like(value) for name, value in plain_model(WIDTH).named_parameters()}
    load(whole, checkpoint_id=str(target))
    assert torch.equal(torch.cat([value.reshape(-1) for value in whole.values()]), second.final_weights()[0])


@pytest.mark.long
def test_no_worker_ever_holds_the_whole_model(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """Weights and two moments, together 690 MB: neither where it is initialized nor where a checkpoint is read.

    What a step needs is FSDP's matter: on gloo, all gradients of a backward pass.
    """
    model = {"width": 1200, "layers": 20, "batch": 4, "step_ms": 0, "replicas": 0, "checkpoint_dir": tmp_path / "saved"}
    weights_bytes = 8 * 20 * 1200 * 1200
    grown = []
    for stop_at in (2, 3):
        job = start(jobs, tmp_path / f"run-{stop_at}", stop_at=stop_at, checkpoint_every=2, **model)
        job.run(4)
        grown.append([event["grown_bytes"] for event in job.of("synced")])
        assert len(grown[-1]) == 4
    assert {event["step"] for event in job.of("loaded")} == {2}
    fresh, loaded = map(max, grown)
    assert weights_bytes / 4 <= fresh < 2 * weights_bytes / 3, grown  # its part, and one module that is whole
    # what was read, and what it became: a quarter of everything each
    assert 2 * 3 * weights_bytes / 4 <= loaded < 2 * weights_bytes, grown


@pytest.mark.long
def test_runs_with_the_same_history_have_the_same_bits(jobs: list[ShardedJob], tmp_path: Path) -> None:
    """Killed in other phases of other steps, but gone on from the same copy, with the same workers."""
    finals = []
    for phase, step in (("drawn", 7), ("backward", 8)):
        folder = tmp_path / f"{phase}-{step}"
        job = start(jobs, folder, Fault("kill", phase, rank=1, step=step), every=5, gates=[step])
        job.start("--standalone", "--min-workers=1", "--max-restarts=0", nproc=3)
        job.wait_for("held", 3, step=step)
        job.open_gate(step)  # the copy of step 6 has arrived by now
        job.wait(240)
        job.check()
        assert job.restarted_from() == 6
        finals.append(job.final_weights()[0])
    assert torch.equal(*finals)


HYBRID = {"hybrid": 2, "replicas": 0, "full_world": 4}


@pytest.mark.long
@pairs(("optimizer",), ("drawn", "forward"), ("backward", "tail"))
def test_with_replicas_in_the_mesh_a_loss_costs_no_step(
    jobs: list[ShardedJob], tmp_path: Path, phases: tuple[str, ...]
) -> None:
    """Two by two: the two that are whole together go on, the third waits, and all four are there again."""
    faults = [Fault("kill", phase, rank=1, step=4 + 7 * n, incarnation=None) for n, phase in enumerate(phases)]
    job = start(jobs, tmp_path, *faults, wait_for_newcomer_at=[8, 15], **HYBRID)
    job.run(4, "--multiple-of=2")
    job.check()
    assert [world for _, world in sorted(job.rounds().items())] == [4, *[2, 4] * len(phases)]
    assert job.lost_steps() == 0


@pytest.mark.long
def test_tensor_parallel_ranks_have_the_same_samples_and_their_parts_move_too(
    jobs: list[ShardedJob], tmp_path: Path
) -> None:
    faults = [Fault("kill", "forward", rank=1, step=6)]
    job = start(jobs, tmp_path, *faults, tensor_parallel=2, width=18, full_world=4, wait_for_newcomer_at=[12])
    job.run(4, "--multiple-of=2")
    job.check()
    assert [world for _, world in sorted(job.rounds().items())] == [4, 2, 4]
