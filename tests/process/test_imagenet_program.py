"""The ImageNet example as a program: accuracy, audit, display, command line, demo, and training on a real etcd."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from rich.console import Console
from torch import nn

from examples.imagenet.audit import SampleLedger, groups_formed, sample_ledger
from examples.imagenet.demo import REPOSITORY_ROOT, Demo, write_page
from examples.imagenet.evaluation import Accuracy, evaluate
from examples.imagenet.events import Event, EventReader, EventWriter, read_events
from examples.imagenet.images import (
    EvalTransform,
    ImageDataset,
    Item,
)
from examples.imagenet.main import FreshStart
from examples.imagenet.options import parse_options
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.etcd import running_etcd

# ------------------------------------------------------------------------------------------------------- the accuracy


class Guesser(nn.Module):
    """Answers each image with its own mean brightness as the best class, and the classes after it next."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        best = images.mean(dim=(1, 2, 3), keepdim=False).round().long()
        return -((torch.arange(10).unsqueeze(0) - best.unsqueeze(1)) % 10).float()


def guessed(labels_and_guesses: list[tuple[int, int]]) -> ImageDataset:
    """A data set whose image i makes the Guesser say guess i."""
    samples = tuple((Path(str(guess)), label) for label, guess in labels_and_guesses)

    class Plain(ImageDataset):
        def __getitem__(self, position: int) -> Item:
            file, label = samples[position]
            return Item(torch.full((3, 2, 2), float(file.name)), label, position)

    return Plain(samples, EvalTransform(2))


def test_accuracy_counts_first_guesses_and_first_five() -> None:
    images = guessed([(3, 3), (7, 3), (8, 3), (2, 9), (5, 5), (4, 0), (4, 9)])
    model = Guesser()
    accuracy = evaluate(model, images, rank=0, world_size=1, batch_size=3, device=torch.device("cpu"))
    assert accuracy == Accuracy(top1=2 / 7, top5=5 / 7)  # 7 is the fifth guess after 3, and 8 the sixth
    assert model.training


# ------------------------------------------------------------------------------------------------ events and the audit


def event(
    kind: str, pid: int, group: int, step: int, *, at_s: float, indices: tuple[int, ...] = (), epoch: int = 0
) -> Event:
    return Event(kind, at_s, pid, rank=0, world_size=1, group=group, step=step, epoch=epoch, indices=indices)


def test_events_come_back_as_they_were_written_and_only_once(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "new")
    reader = EventReader(tmp_path / "new")
    writer.write("attempt", rank=1, world_size=3, group=7, step=4, epoch=2, indices=(5, 6))
    (first,) = reader.poll()
    assert (first.kind, first.indices, first.step, first.pid) == ("attempt", (5, 6), 4, os.getpid())
    writer.write("commit", rank=1, world_size=3, group=7, step=4, epoch=2, loss=0.5)
    (second,) = reader.poll()
    assert (second.kind, second.loss) == ("commit", 0.5)
    assert second.time_s >= first.time_s
    assert reader.poll() == []
    assert read_events(tmp_path / "new") == [first, second]


def run_with_a_loss() -> list[Event]:
    """Workers 1 and 2 train images 0..3 over two steps; 2 dies in step 1, which 1 repeats alone in group 20."""
    return [
        event("attempt", 1, 10, 0, at_s=1.0, indices=(0,)),
        event("attempt", 2, 10, 0, at_s=1.0, indices=(1,)),
        event("commit", 1, 10, 0, at_s=1.1),
        event("commit", 2, 10, 0, at_s=1.1),
        event("attempt", 1, 10, 1, at_s=1.2, indices=(2,)),
        event("attempt", 2, 10, 1, at_s=1.2, indices=(3,)),
        event("formed", 1, 20, 1, at_s=2.0),
        event("attempt", 1, 20, 1, at_s=2.1, indices=(2, 3)),
        event("commit", 1, 20, 1, at_s=2.2),
    ]


def test_a_repeated_step_counts_once() -> None:
    assert sample_ledger(run_with_a_loss(), images=4, epochs=1) == SampleLedger(steps=2, trained=4, lost=0, repeated=0)
    assert groups_formed(run_with_a_loss()) == [10, 20]


def test_a_step_that_a_survivor_had_committed_is_trained_twice_if_repeated() -> None:
    events = [*run_with_a_loss(), event("commit", 1, 10, 1, at_s=1.3)]
    assert sample_ledger(events, images=4, epochs=1).repeated == 1


def test_lost_and_repeated_images_are_counted_per_epoch() -> None:
    events = [
        event("attempt", 1, 10, 0, at_s=1.0, indices=(0, 1)),
        event("commit", 1, 10, 0, at_s=1.1),
        event("attempt", 1, 10, 1, at_s=1.2, indices=(1, 2), epoch=0),
        event("commit", 1, 10, 1, at_s=1.3),
        event("attempt", 1, 10, 2, at_s=1.4, indices=(0, 1, 2), epoch=1),
        event("commit", 1, 10, 2, at_s=1.5),
    ]
    # epoch 0: image 1 twice, image 3 never; epoch 1: image 3 never
    assert sample_ledger(events, images=4, epochs=2) == SampleLedger(steps=3, trained=7, lost=2, repeated=1)
    # the same, where only one epoch of three images was asked for: epoch 1 is too much
    assert sample_ledger(events, images=3, epochs=1) == SampleLedger(steps=3, trained=7, lost=0, repeated=4)


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "/nowhere/at/all"], "no such folder; name one with train/CLASS"),
        (["--arch", "resnet101"], "invalid choice"),
        (["--batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["--epochs", "1.5"], "'1.5' is not a whole number"),
        (["--lr", "nan"], "'nan' is not a positive number"),
        (["--lr", "fast"], "'fast' is not a positive number"),
        (["--num-data-workers", "-1"], "not a whole number of at least 0"),
        (["--no-resume"], "name their folder with --checkpoint-dir"),
        (["--backend", "mpi"], "invalid choice"),
    ],
)
def test_a_senseless_command_line_is_refused_with_the_remedy(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the demo


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_worker_killed_half_way_costs_no_image(tmp_path: Path, digits_folder: Path) -> None:
    (tmp_path / "digits").symlink_to(digits_folder)
    arguments = argparse.Namespace(runs=tmp_path, workers=2, epochs=2, seed=0, kill_rank=0, timeout=150.0)
    demo = Demo(arguments, Console(quiet=True))
    outcome = demo.run()
    assert outcome.accuracy is not None, (demo.folder / "launcher.log").read_text()
    assert outcome.ledger == SampleLedger(steps=30, trained=2 * 1437, lost=0, repeated=0)
    assert outcome.groups >= 2
    assert outcome.recovery_s is not None
    assert json.loads((demo.folder / "report.json").read_text())["ledger"]["lost"] == 0
    page = write_page(demo.folder)
    assert page is not None
    assert "killed by SIGKILL" in page.read_text()


# ------------------------------------------------------------------------------------------ main, alone on a real etcd


def train_alone(etcd: EtcdServer, name: str, folder: Path, digits_folder: Path, *more: str) -> dict[str, Any]:
    """Runs main as the only worker of a run called `name`; returns its report."""
    command = [sys.executable, "-m", "examples.imagenet.main", "--digits-dir", str(digits_folder), "--no-progress"]
    command += ["--init-method", f"etcd://{etcd.endpoint}/{name}?min_workers=1", "--image-size", "8", "--width", "4"]
    command += ["--events-dir", str(folder / "events"), "--output", str(folder / "report.json"), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=REPOSITORY_ROOT)
    assert done.returncode == 0, done.stderr
    assert "done: top-1" in done.stdout
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.long
@pytest.mark.timeout(240)
def test_main_trains_alone_resumes_and_starts_afresh_when_told_to(tmp_path: Path, digits_folder: Path) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    with running_etcd() as etcd:
        first = train_alone(etcd, "first", tmp_path / "a", digits_folder, "--epochs", "1", *checkpoints)
        assert (first["steps"], first["epochs"]) == (15, 1)
        assert first["ledger"] == {"steps": 15, "trained": 1437, "lost": 0, "repeated": 0}

        resumed = train_alone(etcd, "resumed", tmp_path / "a", digits_folder, "--epochs", "2", *checkpoints)
        assert (resumed["steps"], resumed["epochs"]) == (30, 2)
        assert resumed["ledger"] == {"steps": 30, "trained": 2 * 1437, "lost": 0, "repeated": 0}
        steps = [event.step for event in read_events(tmp_path / "a" / "events") if event.kind == "attempt"]
        assert steps == list(range(30))

        fresh = ["--epochs", "1", "--no-resume", "--num-data-workers", "1", *checkpoints]
        afresh = train_alone(etcd, "afresh", tmp_path / "b", digits_folder, *fresh)
        assert afresh["steps"] == 15
        assert afresh["ledger"] == {"steps": 15, "trained": 1437, "lost": 0, "repeated": 0}
        # which data workers run ahead changes nothing: the same numbers as in the first run
        assert afresh["top5"] == first["top5"]


def test_a_fresh_start_sees_its_own_checkpoints_and_no_earlier_ones(tmp_path: Path) -> None:
    class Text:
        def __init__(self, text: bytes) -> None:
            self.text = text

        def save(self, stream: BinaryIO) -> None:
            stream.write(self.text)

        def load(self, stream: BinaryIO) -> None:
            self.text = stream.read()

    save(FileSystemCheckpointManager(tmp_path), Text(b"old"))
    manager = FreshStart(tmp_path, keep=2)
    assert manager.get_latest_checkpoint() is None
    assert load_latest(manager, Text(b"")) is None
    for number in range(4):
        save(manager, Text(b"new %d" % number))
    found = Text(b"")
    assert load_latest(manager, found) is not None
    assert found.text == b"new 3"
    kept = [checkpoint.sequence_id for checkpoint in FileSystemCheckpointManager(tmp_path).list_checkpoints()]
    assert kept == [4, 3, 0]  # two of its own, and the earlier one is not touched
