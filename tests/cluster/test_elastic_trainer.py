"""A Trainer's run that loses workers, or gets them back, ends where an undisturbed one ends, in the same processes."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.cluster.harness import Job
from tests.waiting import wait_until
from torchelastic.testing.faults import Fault

pytest.importorskip(
    "transformers", reason="the adapter for Transformers is needed: pip install 'torchelastic[transformers]'"
)

STEPS = 4 * 4
PHASES = ("forward", "backward", "optimizer", "log", "evaluate", "save", "epoch")
#: Steps at which each of these happens; a phase of a train step is named by the steps before it.
AT = {"forward": 0, "backward": 6, "optimizer": 7, "log": 6, "evaluate": 8, "save": 8, "epoch": 8}
#: Here the losses are logged in the same step.
BEHIND_A_LOG = {"evaluate": 12, "save": 12}


class TrainerJob(Job):
    module = "tests.cluster.trainer_job"


run = TrainerJob.finished


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("undisturbed"), [])


def assert_like(job: Job, other: Job, *, finishers: int = 3) -> None:
    """Weights, steps, learning rates, logged numbers, samples: as if nothing had happened."""
    finals = job.final_weights()
    assert len(finals) == finishers, job.output()[-3000:]
    assert all(torch.equal(finals[0], one) for one in finals[1:]), "workers end with different weights"
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    assert {event["step"] for event in job.of("finished")} == {event["step"] for event in other.of("finished")}
    assert all(event["counted"] == event["step"] for event in job.of("finished")), "the state of a callback"
    assert_logged_alike(job, other)
    for pid in {event["pid"] for event in job.of("step")}:
        told = [event["step"] for event in job.of("step") if event["pid"] == pid]
        assert told == list(range(told[0], told[-1] + 1)), "a callback was told of a step twice, or of one not at all"
    assert samples_of(job) == samples_of(other)


def assert_logged_alike(job: Job, other: Job) -> None:
    def logged(of: Job) -> dict[tuple[int, str], list[float]]:
        found: dict[tuple[int, str], list[float]] = {}
        for event in of.of("log"):
            for name in ("loss", "grad_norm", "learning_rate", "steps"):
                if name in event:
                    found.setdefault((event["step"], name), []).append(event[name])
        return found

    here, there = logged(job), logged(other)
    assert here.keys() == there.keys()
    for what, values in here.items():  # losses are float32, whatever the model is
        assert values == pytest.approx([there[what][0]] * len(values), rel=1e-6), what


def samples_of(job: Job) -> list[Counter[str]]:
    """Of each step: what was trained in the group that tried it last, and so has committed it."""
    found = []
    for step in sorted({event["step"] for event in job.of("trained")}):
        tries = [event for event in job.of("trained") if event["step"] == step]
        last = max(event["round"] for event in tries)
        found.append(Counter(str(row) for event in tries if event["round"] == last for row in event["samples"]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_is_killed_wherever_it_is(tmp_path: Path, undisturbed: Job, phase: str, rank: int) -> None:
    step = BEHIND_A_LOG.get(phase, AT[phase])
    job = run(tmp_path / "job", [Fault("kill", phase, rank=rank, step=step)], "--max-restarts=0", "--min-workers=1")
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
def test_callbacks_begin_in_the_group(undisturbed: Job) -> None:
    begins = {event["pid"]: (event["rank"], event["world"], event["is_zero"]) for event in undisturbed.of("begins")}
    assert sorted(begins.values()) == [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert {event["pid"]: event["rank"] for event in undisturbed.of("finished")} == {
        pid: rank for pid, (rank, _, _) in begins.items()
    }


@pytest.mark.long
def test_a_step_that_others_have_counted_is_told_to_callbacks_all_the_same(tmp_path: Path, undisturbed: Job) -> None:
    job = run(tmp_path / "job", [Fault("raise", "optimizer", rank=1, step=7)])  # the others are through by then
    assert_like(job, undisturbed)
    ends = Counter((event["pid"], event["step"]) for event in job.of("epoch"))
    assert sorted(step for _, step in ends) == sorted([4, 8, 12, 16] * 3)
    assert set(ends.values()) == {1}


@pytest.mark.long
def test_what_a_trainer_counts_is_no_part_of_how_losses_are_looked_at(undisturbed: Job) -> None:
    counted = [event["evaluated"] for event in undisturbed.of("log") if "eval_loss" in event]
    assert counted
    assert counted == [2] * len(counted)  # of 6 samples, on each of 3 ranks


@pytest.mark.long
@pytest.mark.parametrize("phase", ["backward", "evaluate", "save"])
def test_a_newcomer_takes_part_in_whatever_the_others_do(tmp_path: Path, undisturbed: Job, phase: str) -> None:
    faults = [Fault("kill", phase, rank=1, step=AT[phase])]
    job = run(tmp_path / "job", faults, wait_for=3, step_s=0.05)
    assert_like(job, undisturbed)
    assert len({event["pid"] for event in job.of("finished")}) == 3


@pytest.mark.long
def test_losses_that_are_means_over_samples_count_each_sample_alike(tmp_path: Path) -> None:
    ends = [run(tmp_path / "three", [], classified=True)]
    kill = Fault("kill", "backward", rank=1, step=3)
    ends += [run(tmp_path / "two", [kill], "--max-restarts=0", "--min-workers=1", classified=True)]
    assert_like(ends[1], ends[0], finishers=2)


@pytest.mark.long
def test_a_hung_worker_is_left_behind(tmp_path: Path, undisturbed: Job) -> None:
    job = run(tmp_path / "job", [Fault("hang", "backward", rank=2, step=6)], "--max-restarts=0", "--min-workers=1")
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
def test_the_best_metric_and_the_patience_of_early_stopping_are_undone_with_an_evaluation(tmp_path: Path) -> None:
    kill = Fault("kill", "save", rank=2, step=8)  # behind an evaluation, in the same step
    ends = [
        run(tmp_path / name, faults, *launcher, patience=1)
        for name, faults, launcher in (
            ("undisturbed", [], ()),
            ("killed", [kill], ("--max-restarts=0", "--min-workers=1")),
        )
    ]
    results = [{(event["step"], event["best"] is None) for event in job.of("finished")} for job in ends]
    assert results[0] == results[1]


@pytest.mark.long
def test_all_at_once_go_on_from_the_trainers_own_checkpoint(tmp_path: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "backward", worker=worker, step=10) for worker in range(3)]
    job = run(tmp_path / "job", faults, resume=True)
    assert_like_in_the_end(job, undisturbed)


def assert_like_in_the_end(job: Job, other: Job) -> None:
    finals = job.final_weights()
    assert len(finals) == 3, job.output()[-3000:]
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    assert {event["step"] for event in job.of("finished")} == {STEPS}


@pytest.mark.long
def test_a_loss_of_the_users_own_that_is_not_multiplied_by_the_ranks(tmp_path: Path) -> None:
    ends = [run(tmp_path / "three", [], own_loss=True)]
    kill = Fault("kill", "backward", rank=1, step=3)
    ends += [run(tmp_path / "two", [kill], "--max-restarts=0", "--min-workers=1", own_loss=True)]
    assert_like(ends[1], ends[0], finishers=2)
    assert {event["tokens"] for job in ends for event in job.of("finished")} == {160 * 6}  # padding counts none


@pytest.mark.long
def test_who_comes_when_the_run_is_over_publishes_nothing(tmp_path: Path, undisturbed: Job) -> None:
    kill = Fault("kill", "log", rank=0, step=15)  # the others end before this worker has loaded its model again
    job = run(tmp_path / "job", [kill], "--min-workers=1", late=True)
    [late] = [event for event in job.of("finished") if event["step"] == 0]
    assert late["rank"] == -1
    assert not late["publishes"]
    assert sorted(event["rank"] for event in job.of("finished") if event["step"] == STEPS) == [0, 1]
    from safetensors.torch import load_file

    published = load_file(job.folder / "final" / "model.safetensors")["transformer.wte.weight"].reshape(-1)
    torch.testing.assert_close(published, undisturbed.final_weights()[0][: published.numel()], rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_workers_that_are_asked_to_leave_go_no_further_than_train(tmp_path: Path) -> None:
    job = TrainerJob(tmp_path / "job", [], step_s=0.2)
    try:
        agent = job.start("--standalone", nproc=2)
        wait_until(lambda: job.of("step"), 60, "it trains")
        agent.send_signal(signal.SIGTERM)
        job.wait()
    finally:
        job.stop()
    assert [event["others_go_on"] for event in job.of("stopped early")] == [False, False], job.output()[-3000:]
    assert not job.of("finished")
    assert not (job.folder / "final").exists()


@pytest.mark.long
def test_all_at_once_in_the_middle_of_a_save_go_on_from_the_one_before(tmp_path: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "half a save", worker=worker, step=8) for worker in range(3)]
    job = run(tmp_path / "job", faults, resume=True)
    assert_like_in_the_end(job, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("every", "first"), [(1, 11), (9, 7)], ids=["newer", "older than the Trainer's own"])
def test_all_at_once_go_on_from_memory(tmp_path: Path, undisturbed: Job, every: int, first: int) -> None:
    faults = [Fault("kill", "backward", worker=worker, step=10) for worker in range(3)]
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        job = run(tmp_path / "job", faults, memory=str(memory / "job"), memory_every=every, resume=True)
    finally:
        shutil.rmtree(memory)
    assert_like_in_the_end(job, undisturbed)
    assert min(event["step"] for event in job.of("step") if event["incarnation"] > 0) == first


class SftJob(Job):
    module = "tests.cluster.sft_job"


@pytest.mark.slow
def test_trl_sft_with_two_kills(tmp_path: Path) -> None:
    reason = (
        "trl is not installed; elsewhere: pip install trl, pytest -m slow tests/cluster/test_elastic_trainer.py -k trl"
    )
    pytest.importorskip("trl", reason=reason)
    faults = [Fault("kill", "backward", rank=1, step=step) for step in (2, 5)]
    jobs = [
        SftJob.finished(tmp_path / name, planned, "--max-restarts=0", "--min-workers=1")
        for name, planned in (("undisturbed", []), ("killed", faults))
    ]
    [first, *others] = [event["losses"] for job in jobs for event in job.of("finished")]
    assert len(first) == 4
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)
    torch.testing.assert_close(jobs[1].final_weights()[0], jobs[0].final_weights()[0], rtol=1e-3, atol=1e-3)
