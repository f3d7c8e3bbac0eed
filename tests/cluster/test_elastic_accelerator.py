"""A script of Accelerate that loses workers, or gets them back, ends where an undisturbed one ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.harness import Event, Job
from torchelastic.testing.faults import Fault

pytest.importorskip(
    "accelerate", reason="the adapter for Accelerate is needed: pip install 'torchelastic[transformers]'"
)

SAMPLES, EPOCHS, STEPS = 22, 4, 4 * 3
#: Steps at which each of these happens; `evaluate` comes behind so many steps.
AT = {"forward": 4, "backward": 5, "optimizer": 4, "end": 5, "evaluate": 6}
ALONE = ("--max-restarts=0", "--min-workers=1")


class AcceleratorJob(Job):
    module = "tests.cluster.accelerator_job"


run = AcceleratorJob.finished


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("undisturbed"), [])


def assert_like(job: Job, other: Job, *, finishers: int = 3) -> None:
    """Weights, learning rates, counters, evaluations, samples: as if nothing had happened."""
    finals = job.final_weights()
    assert len(finals) == finishers, job.output()[-3000:]
    assert all(torch.equal(finals[0], one) for one in finals[1:]), "workers end with different weights"
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    [expected, *_] = other.of("finished")
    for event in job.of("finished"):
        assert event["evaluated"] == [3, 6, 9, 12]
        assert (event["trained"], event["scale"]) == (STEPS, expected["scale"])
        assert event["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert values(job.of("step"), "rate") == values(other.of("step"), "rate")
    assert values(job.of("evaluated"), "error") == values(other.of("evaluated"), "error")
    assert_each_sample_once(job)
    assert values(job.of("tracked"), "error").keys() >= {0, 3, 6, 9, 12}


def values(events: list[Event], name: str) -> dict[int, float]:
    """By step; the same on all ranks."""
    found: dict[int, float] = {}
    for event in events:
        assert event[name] == pytest.approx(found.setdefault(event["step"], event[name]), rel=1e-9)
    return {step: float(f"{value:.9g}") for step, value in found.items()}


def assert_each_sample_once(job: Job) -> None:
    """In each epoch; of each step counts what was trained in the group that tried it last."""
    trained: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    for step in range(STEPS):
        tries = job.of("trained", step=step)
        last = max(event["round"] for event in tries)
        for event in tries:
            trained[event["epoch"]] += event["samples"] if event["round"] == last else []
    for epoch, samples in trained.items():
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}"


@pytest.mark.long
@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_is_killed_wherever_it_is(tmp_path: Path, undisturbed: Job, phase: str, rank: int) -> None:
    job = run(tmp_path / "job", [Fault("kill", phase, rank=rank, step=AT[phase])], *ALONE)
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
def test_trackers_begin_once_and_with_rank_0(undisturbed: Job, tmp_path: Path) -> None:
    assert len(undisturbed.of("tracker begins")) == 1
    assert {event["pid"] for event in undisturbed.of("tracked")} == {undisturbed.of("tracker begins")[0]["pid"]}
    job = run(tmp_path / "job", [Fault("kill", "forward", rank=0, step=4)], *ALONE)
    assert len(job.of("tracker begins")) == 2
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["backward", "evaluate"])
def test_a_newcomer_takes_part_in_whatever_the_others_do(tmp_path: Path, undisturbed: Job, phase: str) -> None:
    job = run(tmp_path / "job", [Fault("kill", phase, rank=1, step=AT[phase])], wait_for=3, step_s=0.05)
    assert_like(job, undisturbed)
    assert {event["world"] for event in job.of("evaluated", step=STEPS)} == {3}


@pytest.mark.long
def test_a_hung_worker_is_left_behind(tmp_path: Path, undisturbed: Job) -> None:
    job = run(tmp_path / "job", [Fault("hang", "backward", rank=2, step=5)], *ALONE)
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
def test_one_worker_alone_is_like_three(tmp_path: Path, undisturbed: Job) -> None:
    assert_like(run(tmp_path / "job", [], nproc=1), undisturbed, finishers=1)


@pytest.mark.long
def test_sums_and_a_gradient_scaler_are_undone(tmp_path: Path) -> None:
    ends = [run(tmp_path / "undisturbed", [], sums=True, scaled=True)]
    kill = Fault("kill", "end", rank=1, step=5)  # behind the scaler's update, which makes a step in three larger
    ends += [run(tmp_path / "killed", [kill], *ALONE, sums=True, scaled=True)]
    assert ends[0].of("finished")[0]["scale"] == 4.0 * 2 ** (STEPS // 3)
    assert_like(ends[1], ends[0], finishers=2)


@pytest.mark.long
def test_all_at_once_go_on_from_memory(tmp_path: Path, tmpfs: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "backward", worker=worker, step=8) for worker in range(3)]
    job = run(tmp_path / "job", faults, memory=tmpfs)
    assert_ends_like(job, undisturbed)
    assert min(event["step"] for event in job.of("step") if event["pid"] in pids(job)) > 0


@pytest.mark.long
def test_all_at_once_go_on_from_what_save_state_has_saved(tmp_path: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "backward", worker=worker, step=8) for worker in range(3)]
    job = run(tmp_path / "job", faults, saved=True)
    assert_ends_like(job, undisturbed)
    assert min(event["step"] for event in job.of("step") if event["pid"] in pids(job)) == 6
    assert_like(job, undisturbed)  # what is in `extra`, too


def pids(job: Job) -> set[int]:
    """Of those that have finished, who are not the first ones."""
    return {event["pid"] for event in job.of("finished")}


def assert_ends_like(job: Job, other: Job) -> None:
    finals = job.final_weights()
    assert len(finals) == 3, job.output()[-3000:]
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    assert values(job.of("step"), "rate") == values(other.of("step"), "rate")
    assert_each_sample_once(job)
