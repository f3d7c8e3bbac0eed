"""A run of Lightning that loses workers, or gets them back, ends as an undisturbed one, in the same processes."""

from __future__ import annotations

import csv
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.harness import Event, Job
from tests.waiting import wait_until
from torchelastic.testing.faults import Fault

pytest.importorskip("lightning", reason="the adapter for Lightning is needed: pip install 'torchelastic[lightning]'")

STEPS = 3 * 4
#: Optimizer steps at which each of these happens.
AT = {
    "forward": 5, "backward": 5, "optimizer": 5, "batch end": 6, "validate": 6, "save": 6, "epoch end": 8,
    "epoch start": 4,
}  # fmt: skip
#: CSVLogger writes at a batch's end, and LearningRateMonitor logs at its begin: with rank 0 killed between both, behind
#: a step that counts, these lines are gone with its memory.
UNWRITTEN = ("lr-AdamW at 5", "lr-AdamW-1 at 5")
ALONE = ("--max-restarts=0", "--min-workers=1")
LOGGED = ("lr", "train_loss_step", "train_loss_epoch", "val_loss")


class LightningJob(Job):
    module = "tests.cluster.lightning_job"


run = LightningJob.finished


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("undisturbed"), [])


def at(event: Event) -> tuple[int, int, int]:
    return event["step"], event["epoch"], event["batch"]


def assert_like(job: Job, other: Job, *, finishers: int = 3, lost: tuple[str, ...] = ()) -> None:
    """Weights, steps, learning rates, logged values, best metric, samples: as if nothing had happened.

    Args:
        job: with a fault.
        other: undisturbed.
        finishers: how many workers end in order.
        lost: what the lost rank 0 had logged beside its step, and not written.
    """
    finals = job.final_weights()
    assert len(finals) == finishers, job.output()[-3000:]
    for one in finals:
        torch.testing.assert_close(one, other.final_weights()[0], rtol=1e-9, atol=1e-9)
    assert_told_alike(job, other)
    assert samples_of(job) == samples_of(other)
    for event in job.of("finished"):
        undisturbed = other.of("finished")[0]
        assert event["best"] == pytest.approx(undisturbed["best"], rel=1e-9)
        assert [event[name] for name in ("step", "epoch", "best_file", "waited")] == [
            undisturbed[name] for name in ("step", "epoch", "best_file", "waited")
        ]
    found = logged(job)
    wanted = {name: value for name, value in logged(other).items() if name in found or name not in lost}
    assert found == pytest.approx(wanted, rel=1e-9)


def assert_told_alike(job: Job, other: Job) -> None:
    """Callbacks have seen each batch once, from where their worker came; with the same values."""
    wanted = {at(event): event for event in other.of("batch", worker=0)}
    for pid in {event["pid"] for event in job.of("batch")}:
        told = [event for event in job.of("batch") if event["pid"] == pid]
        places = [at(event) for event in told]
        begins = list(wanted).index(places[0])
        assert places == list(wanted)[begins : begins + len(places)], "a callback was told of a batch twice, or of none"
        for event in told:
            values, expected = (
                {name: one[name] for name in LOGGED if name in one} for one in (event, wanted[at(event)])
            )
            assert values == pytest.approx(expected, rel=1e-9), at(event)


def samples_of(job: Job) -> list[Counter[int]]:
    """Of each step: what was trained in the group that tried it last, and so has committed it."""
    found = []
    for step in sorted({event["step"] for event in job.of("trained")}):
        tries = [event for event in job.of("trained") if event["step"] == step]
        last = max(event["round"] for event in tries)
        found.append(Counter(row for event in tries if event["round"] == last for row in event["samples"]))
    return found


def logged(job: Job) -> dict[str, float]:
    """What is in the log's one file, by name and step; a line that is repeated says the same."""
    [file] = job.folder.glob("logs/**/metrics.csv")
    found: dict[str, float] = {}
    for row in csv.DictReader(file.read_text().splitlines()):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                known = found.setdefault(f"{name} at {row['step']}", float(value))
                assert known == pytest.approx(float(value), rel=1e-9), (name, row)
    return found


@pytest.mark.long
@pytest.mark.parametrize("phase", AT)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_is_killed_wherever_it_is(tmp_path: Path, undisturbed: Job, phase: str, rank: int) -> None:
    job = run(tmp_path / "job", [Fault("kill", phase, rank=rank, step=AT[phase])], *ALONE)
    assert_like(job, undisturbed, finishers=2, lost=UNWRITTEN if (rank, phase) == (0, "batch end") else ())


@pytest.mark.long
@pytest.mark.parametrize("phase", ["backward", "batch end", "validate", "save", "epoch end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_newcomer_enters_where_the_others_are(tmp_path: Path, undisturbed: Job, phase: str, rank: int) -> None:
    faults = [Fault("kill", phase, rank=rank, step=AT[phase])]
    job = run(tmp_path / "job", faults, wait_for=3, step_s=0.05)
    assert_like(job, undisturbed, lost=UNWRITTEN if (rank, phase) == (0, "batch end") else ())
    assert len({event["pid"] for event in job.of("finished")}) == 3


@pytest.mark.long
def test_two_losses_leave_one_that_trains_all(tmp_path: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "backward", rank=1, step=3), Fault("kill", "validate", rank=0, step=6)]
    job = run(tmp_path / "job", faults, *ALONE)
    assert_like(job, undisturbed, finishers=1)


@pytest.mark.long
def test_a_hung_worker_is_left_behind(tmp_path: Path, undisturbed: Job) -> None:
    job = run(tmp_path / "job", [Fault("hang", "backward", rank=2, step=5)], *ALONE)
    assert_like(job, undisturbed, finishers=2)


@pytest.mark.long
def test_early_stopping_counts_a_validation_once(tmp_path: Path) -> None:
    ends: list[list[Any]] = []
    for name, faults, launcher in (
        ("undisturbed", [], ()),
        ("killed", [Fault("kill", "save", rank=2, step=6)], ALONE),
    ):
        job = run(tmp_path / name, faults, *launcher, patience=1, min_delta=0.2, epochs=12)
        ends.append([(event["step"], event["waited"], event["best_file"]) for event in job.of("finished")])
    assert ends[0][0][0] < 12 * 4, "it has stopped early"
    assert set(ends[0]) == set(ends[1])


@pytest.mark.long
def test_all_at_once_go_on_from_lightnings_own_checkpoint(tmp_path: Path, undisturbed: Job) -> None:
    faults = [Fault("kill", "backward", worker=worker, step=9) for worker in range(3)]
    job = run(tmp_path / "job", faults, resume=True)
    assert_ends_like(job, undisturbed)
    again = [event["step"] for event in job.of("batch") if event["incarnation"] > 0]
    assert min(again) == 9  # behind the last validation, of step 8, where last.ckpt is from


@pytest.mark.long
def test_all_at_once_go_on_from_memory(tmp_path: Path, undisturbed: Job) -> None:
    memory = tempfile.mkdtemp(dir="/dev/shm")
    try:
        faults = [Fault("kill", "backward", worker=worker, step=7) for worker in range(3)]
        job = run(tmp_path / "job", faults, memory=memory)
    finally:
        shutil.rmtree(memory)
    assert_ends_like(job, undisturbed)
    again = [event["step"] for event in job.of("batch") if event["incarnation"] > 0]
    assert min(again) in (7, 8)  # what follows the optimizer's step is a step of its own


def assert_ends_like(job: Job, other: Job) -> None:
    finals = job.final_weights()
    assert len(finals) == 3, job.output()[-3000:]
    torch.testing.assert_close(finals[0], other.final_weights()[0], rtol=1e-9, atol=1e-9)
    ends = [(event["step"], event["epoch"], event["best_file"]) for event in job.of("finished")]
    assert set(ends) == {(STEPS, 3, "step=12.ckpt")}


@pytest.mark.long
def test_who_comes_when_the_run_is_over_saves_nothing(tmp_path: Path, undisturbed: Job) -> None:
    kill = Fault("kill", "epoch end", rank=0, step=12)  # the others end before this worker has loaded its model again
    job = run(tmp_path / "job", [kill], "--min-workers=1", late=True)
    assert sorted((event["rank"], event["step"]) for event in job.of("finished")) == [(0, STEPS), (1, STEPS)]
    assert "it has no result, and ends here" in job.output()
    saved = torch.load(job.folder / "final.ckpt", weights_only=False)
    assert saved["global_step"] == STEPS
    weights = torch.cat([tensor.reshape(-1) for tensor in saved["state_dict"].values()])
    torch.testing.assert_close(weights, undisturbed.final_weights()[0], rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_workers_that_are_asked_to_leave_go_no_further_than_fit(tmp_path: Path) -> None:
    job = LightningJob(tmp_path / "job", [], step_s=0.2)
    try:
        agent = job.start("--standalone", nproc=2)
        wait_until(lambda: job.of("batch"), 100, "it trains")
        agent.send_signal(signal.SIGTERM)
        job.wait()
    finally:
        job.stop()
    assert [event["others_go_on"] for event in job.of("stopped early")] == [False, False], job.output()[-3000:]
    assert not job.of("finished")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision(tmp_path: Path, precision: str) -> None:
    kill = Fault("kill", "optimizer", rank=1, step=5)
    ends = [
        run(tmp_path / name, faults, *launcher, precision=precision).final_weights()[0]
        for name, faults, launcher in (("undisturbed", [], ()), ("killed", [kill], ALONE))
    ]
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-2, atol=2e-2)
