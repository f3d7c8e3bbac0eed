"""A worker that joins never costs the run: who holds the state goes on, whatever the first step with it raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Event, Job, run_standalone
from tests.waiting import wait_until
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

#: More often than anything is tried.
ALWAYS = 1000
GOES_ON = "the others go on without what has joined, which ends"
ENDS = "the others go on without this worker, as their first step with it had a new error"


def host(etcd: EtcdServer, run_id: str, workers: str = "1:2") -> list[str]:
    """One host of a run that starts with whoever is there; its worker is started again up to three times."""
    return [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", f"--nnodes={workers}", "--last-call=0.5"]


def join(job: Job, etcd: EtcdServer, run_id: str) -> None:
    """Start one host, and another one when the first has begun to train; wait for the end of the first, which is good.

    The first one's fifth step waits for a newcomer.
    """
    job.start(*host(etcd, run_id), nproc=1)
    job.wait_for_step(4)
    job.start(*host(etcd, run_id), nproc=1)
    assert job.wait()[0] == 0, job.output()[-4000:]


def is_of_newcomer(job: Job, event: Event) -> bool:
    return bool(event["pid"] != job.of("started")[0]["pid"])


def errors(job: Job, *, of_newcomer: bool) -> set[str]:
    """The kinds of errors that one of the two has raised or seen."""
    return {error["kind"] for error in job.of("error") if is_of_newcomer(job, error) == of_newcomer}


def starts_of_newcomer(job: Job) -> int:
    return sum(is_of_newcomer(job, event) for event in job.of("started"))


def ending(output: str) -> str:
    """What a launcher says at the end of the first failure of its worker."""
    return output[output.index("worker 0 failed: exit code 1") :]


# --- an error that the group of before did not have -------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("where", ["step", "sync"])
def test_an_error_that_all_raise_with_a_newcomer_ends_that_alone_and_for_good(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, where: str
) -> None:
    job = jobs([Fault("crash", f"{where}-of-2", times=ALWAYS)], wait_for_newcomer_at=[5], full_world=2)
    join(job, etcd, run_id)
    assert "ValueError" in errors(job, of_newcomer=False)
    assert "ValueError" in errors(job, of_newcomer=True)
    job.check_identity(finishers=1)
    assert starts_of_newcomer(job) == 1, "it is not started again"
    assert job.output_of(0).count(GOES_ON) == 1
    assert ENDS in job.output_of(1)
    assert "ValueError: injected" in ending(job.output_of(1))


@pytest.mark.long
@pytest.mark.parametrize("where", ["step", "tail", "sync"])
def test_a_runtime_error_that_comes_three_times_with_a_newcomer_does_not_end_the_others(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, where: str
) -> None:
    job = jobs([Fault("raise", f"{where}-of-2", times=ALWAYS)], wait_for_newcomer_at=[5], full_world=2)
    join(job, etcd, run_id)
    assert sum(error["text"].startswith("injected") for error in job.of("error")) >= 3
    job.check_identity(finishers=1)
    assert starts_of_newcomer(job) == 1
    assert "RuntimeError: injected" in ending(job.output_of(1))


@pytest.mark.long
@pytest.mark.parametrize("where", ["step", "sync"])
def test_an_error_that_only_the_newcomer_raises_ends_that_alone(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, where: str
) -> None:
    faults = [Fault("crash", f"{where}-of-2", rank=1, incarnation=None, times=ALWAYS)]
    job = jobs(faults, wait_for_newcomer_at=[5], full_world=2, epochs=40)
    join(job, etcd, run_id)
    assert "ValueError" not in errors(job, of_newcomer=False)
    assert "ValueError" in errors(job, of_newcomer=True)
    assert job.plan.struck() == [0]
    job.check_identity(finishers=1)
    assert GOES_ON not in job.output_of(0)
    assert "ValueError: injected" in ending(job.output_of(1))


@pytest.mark.long
@pytest.mark.parametrize("where", ["step", pytest.param("sync", marks=pytest.mark.daily)])
def test_a_newcomer_that_does_not_raise_what_the_others_do_ends_with_their_error(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, where: str
) -> None:
    job = jobs([Fault("crash", f"{where}-of-2", rank=0, times=ALWAYS)], wait_for_newcomer_at=[5], full_world=2)
    join(job, etcd, run_id)
    assert "ValueError" in errors(job, of_newcomer=False)
    assert "ValueError" not in errors(job, of_newcomer=True)
    job.check_identity(finishers=1)
    assert starts_of_newcomer(job) == 1
    assert job.output_of(0).count(GOES_ON) == 1
    assert f"NonRetryableException: {ENDS}: ValueError: injected" in ending(job.output_of(1))


@pytest.mark.long
def test_of_three_workers_the_two_that_have_trained_go_on(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    job = jobs([Fault("crash", "step-of-3", times=ALWAYS)], wait_for_newcomer_at=[5])
    for _ in range(2):
        job.start(*host(etcd, run_id, "2:3"), nproc=1)
    job.wait_for_step(4)
    job.start(*host(etcd, run_id, "2:3"), nproc=1)
    assert job.wait()[:2] == [0, 0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    job.check_identity(finishers=2)
    assert max(job.rounds().values()) == 3
    assert len(job.of("started")) == 3


@pytest.mark.long
def test_an_error_that_comes_without_the_newcomer_too_is_raised(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    """The step itself fails: at most the newcomer was ended in vain."""
    faults = [Fault("crash", "step", step=step, incarnation=None, times=ALWAYS) for step in range(6, 10)]
    job = jobs(faults, wait_for_newcomer_at=[5], full_world=2)
    job.start(*host(etcd, run_id), "--max-restarts=0", nproc=1)
    job.wait_for_step(4)
    job.start(*host(etcd, run_id), "--max-restarts=0", nproc=1)
    assert job.wait() == [1, 1], job.output()[-4000:]
    assert "ValueError: injected" in ending(job.output_of(0))


@pytest.mark.long
def test_a_newcomer_without_which_the_others_are_too_few_is_started_again_and_the_state_waits_for_it(
    jobs: MakeJob,
) -> None:
    faults = [
        Fault("kill", "step", worker=1, step=6),
        Fault("crash", "sync-of-2", rank=0, step=6, times=1),  # what the source raises as it is to send its state
    ]
    job = jobs(faults)
    run_standalone(job, "--min-workers=2", nproc=2)
    assert job.plan.struck() == [0, 1]
    job.check_identity(finishers=2)
    assert len(job.of("started", worker=0)) == 1, "the survivor was never ended"
    assert len(job.of("started", worker=1)) == 3
    assert job.output().count(GOES_ON) == 1


# --- as people write it -----------------------------------------------------------------------------------------------

#: The fifth step waits for a newcomer; all that counts is trained by one worker alone.
SCRIPT = """
import json, os, pathlib, time
import torch, torch.distributed as dist, torchelastic
from torch.utils.data import TensorDataset
from torchelastic.p2p import step_agreement

torch.set_num_threads(1)
step_agreement.interval_steps = lambda *_: 1  # a newcomer gets in after the next step
FOLDER = pathlib.Path(__file__).parent
BATCH = {batch}


def note(**what):
    with (FOLDER / "notes").open("a") as file:
        file.write(json.dumps({{"pid": os.getpid(), **what}}) + "\\n")


def make():
    torch.manual_seed(0)
    inputs = torch.randn(20 * BATCH, 4, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), {layer}, torch.nn.Linear(8, 1)).double()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True)), model, torch.optim.Adam(model.parameters(), lr=0.01)


dataset, model, optimizer = make()
sampler = torchelastic.ElasticBatchSampler(dataset, BATCH, epochs=1, seed=1, min_local_batch={least})
loader = torchelastic.ElasticLoader(dataset, sampler)
coordinator = torchelastic.CoordinatorP2P("gloo")
state = torchelastic.ModelState(model, optimizer, sampler=sampler)


def train_step(state):
    while state.step == 5 and coordinator.world_size == 1 and not coordinator.rendezvous.num_nodes_waiting():
        time.sleep(0.01)
    inputs, targets = next(loader)
    if coordinator.world_size > 1:
        note(tried=state.step, rank=coordinator.rank)
    {in_step}
    loss = (state.model(inputs) - targets).square().mean()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    note(trained=state.step, world=coordinator.world_size, samples=list(sampler.pending[0].indices))


note(started=True)
torchelastic.train(coordinator, train_step, state)
note(weights=torch.nn.utils.parameters_to_vector(model.parameters()).tolist())
"""

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a batch that two cannot share": (
        # https://github.com/deepspeedai/DeepSpeed/issues/3146 and 6914: from 2 to 3 workers, and what it asserts
        "assert BATCH % coordinator.world_size == 0, 'the batch cannot be shared'",
        {"batch": 5},
        "AssertionError: the batch cannot be shared",
    ),
    "a share of one sample, where that is chosen": (
        # https://github.com/NRCan/geo-deep-learning/issues/113 and many more
        "pass",
        {"batch": 2, "layer": "torch.nn.BatchNorm1d(8)", "least": 1},
        "layers that do without (GroupNorm, LayerNorm; SyncBatchNorm where there are several workers)",
    ),
    "an attribute that the wrapped model does not have": (
        # https://github.com/kohya-ss/sd-scripts/issues/1272 and many more
        "(model if coordinator.world_size == 1 else dist).train()",
        {},
        "AttributeError: module 'torch.distributed' has no attribute 'train'",
    ),
    "a state that cannot be sent": (
        # https://github.com/horovod/horovod/issues/2995: whatever is raised in the sync with a newcomer
        "next(iter(optimizer.state.values()), {})['decay'] = lambda step: 0.9",
        {},
        "optimizer['state']['0.weight']['decay'] cannot be pickled",
    ),
}
#: What all workers of the group run into.
MADE_BY_ALL = [case for case in CASES if case != "a state that cannot be sent"]
CANNOT_SEND = "no worker that joins, or is started again, could receive this state"


def notes_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def undisturbed(batch: int, layer: torch.nn.Module | None) -> tuple[list[float], list[list[int]]]:
    """The weights of a plain loop, and the samples of its steps."""
    torch.manual_seed(0)
    inputs = torch.randn(20 * batch, 4, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), layer or torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = ElasticBatchSampler(dataset, batch, epochs=1, seed=1)
    samples = []
    for x, y in ElasticLoader(dataset, sampler):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples.append(list(sampler.pending[0].indices))
        sampler.commit()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), samples


@pytest.mark.long
@pytest.mark.parametrize("case", list(CASES))
def test_what_goes_wrong_with_one_worker_more_costs_that_worker_alone(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path, case: str
) -> None:
    in_step, options, error = CASES[case]
    chosen: dict[str, Any] = {"batch": 4, "layer": "torch.nn.Tanh()", "least": None, **options}
    (tmp_path / "train.py").write_text(SCRIPT.format(in_step=in_step, **chosen))
    job = jobs()
    command = [*host(etcd, run_id), "--nproc-per-node=1", str(tmp_path / "train.py")]
    job.start_launcher(*command)
    wait_until(lambda: any(note.get("trained") == 3 for note in notes_of(tmp_path)), 60, "three steps")
    job.start_launcher(*command)
    assert job.wait()[0] == 0, job.output()[-4000:]
    notes = notes_of(tmp_path)
    (last,) = [note for note in notes if "weights" in note]
    trained = [note for note in notes if "trained" in note and note["pid"] == last["pid"]]
    weights, samples = undisturbed(chosen["batch"], torch.nn.BatchNorm1d(8) if "BatchNorm" in chosen["layer"] else None)
    assert {note["world"] for note in trained} == {1}
    assert [note["trained"] for note in trained] == list(range(20)), "no step twice, none from the beginning again"
    assert [note["samples"] for note in trained] == samples
    assert last["weights"] == weights, "bit by bit"
    output = job.output()
    # a state that cannot be sent is said to be so by who holds it, early, and ends who should receive it, at once
    assert output.count(GOES_ON if case in MADE_BY_ALL else CANNOT_SEND) == 1
    assert error in output[output.index("failed: exit code 1") :]
    assert sum("started" in note for note in notes) == 2, "what joined is not started again"


# --- an error that only a smaller group has ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("verb", ["crash", "raise"])
def test_who_fails_after_a_loss_keeps_the_state_until_there_are_as_many_as_before(jobs: MakeJob, verb: str) -> None:
    """The lost worker is started again, and the step goes on where it was."""
    faults = [Fault("kill", "step", worker=1, step=6), Fault(verb, "step-of-1", incarnation=None, times=ALWAYS)]
    job = jobs(faults)
    run_standalone(job, "--min-workers=1", nproc=2)
    assert job.plan.struck() == [0, 1], "the survivor was alone, and failed"
    job.check_identity(finishers=2)
    assert len(job.of("started", worker=0)) == 1, "the survivor was never ended"
    assert "comes again when there are 2 workers" in job.output()


@pytest.mark.long
def test_where_those_who_are_waited_for_do_not_come_back_the_state_is_saved_and_the_run_ends(
    jobs: MakeJob, tmp_path: Path
) -> None:
    faults = [Fault("kill", "step", worker=1, step=6), Fault("crash", "step-of-1", times=ALWAYS)]
    options: dict[str, Any] = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": 1000}
    job = jobs(faults, **options)
    job.start("--standalone", "--min-workers=1", "--max-restarts=0", nproc=2)
    assert job.wait() == [1], "and not after --rdzv-timeout, 600 s"
    assert job.plan.struck() == [0, 1]
    assert {event["step"] for event in job.of("saved")} == {6}
    assert "failed for good; the others are fewer than min_workers=2: the run ends" in job.output()
    assert "ValueError: injected" in job.output()
    again = Job(tmp_path / "again", **options)
    run_standalone(again, nproc=2)
    assert {event["step"] for event in again.of("loaded")} == {6}


@pytest.mark.long
def test_an_error_that_comes_in_the_smaller_group_and_again_with_a_newcomer_is_raised(jobs: MakeJob) -> None:
    faults = [Fault("kill", "step", worker=1, step=6), Fault("crash", "step", step=6, incarnation=None, times=ALWAYS)]
    job = jobs(faults)
    job.start("--standalone", "--min-workers=1", "--max-restarts=1", nproc=2)
    assert job.wait() == [1]
    assert job.plan.struck() == [0, 1]
    assert "ValueError: injected" in ending(job.output())
