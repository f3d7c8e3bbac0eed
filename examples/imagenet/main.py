"""Elastic training of a ResNet on a folder of images: `torchelastic run ... -m examples.imagenet.main`.

Everything that makes it elastic is in `Classifier` (what must survive), `Training.train_step` (one step, repeatable)
and `main` (who trains with whom). Workers may be killed, added and removed at any time; no image of an epoch is left
out or trained twice, and the batch over all workers keeps its size.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by

import torchelastic
from examples.imagenet.audit import sample_ledger
from examples.imagenet.digits import write_digits
from examples.imagenet.evaluation import Accuracy, evaluate
from examples.imagenet.events import EventWriter, read_events
from examples.imagenet.images import EvalTransform, ImageDataset, ImageIndex, TrainTransform, index_images
from examples.imagenet.options import SMALL_IMAGE_EDGE, Options, depth_of, parse_options
from examples.imagenet.progress import RunDisplay
from examples.imagenet.resnet import resnet
from examples.imagenet.schedule import learning_rate
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.checkpoint.compat.elastic01.file_system import FileSystemCheckpoint
from torchelastic.data import BatchShare, ElasticBatchSampler, ElasticLoader
from torchelastic.distributed import broadcast_long
from torchelastic.p2p import CoordinatorP2P

PROCESS_GROUP_TIMEOUT_MS = 60_000
KEPT_CHECKPOINTS = 3
WARMUP_FRACTION = 0.1


class Classifier(torchelastic.ModelState):
    """Model, optimizer and place in the data; knows its group, and tells the event file and the display about it.

    Args:
        model: the plain module.
        optimizer: over its parameters.
        sampler: knows what was trained on.
        events: where to write them.
        display: what to show.

    Attributes:
        rank: of this worker in the present group; -1 before its first.
        world_size: of the present group; 0 before the first.
        group: a number that only the present group has.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticBatchSampler,
        events: EventWriter,
        display: RunDisplay,
    ) -> None:
        super().__init__(model, optimizer, sampler=sampler)
        self.rank, self.world_size, self.group = -1, 0, 0
        self._events = events
        self._display = display

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Synchronizes everybody; from here on the group is ready."""
        super().sync(world_size, rank)
        self.rank, self.world_size = rank or 0, world_size or 1
        # Unique, so that the events of a group that failed at once are not taken for those of the next one. Not from
        # `random`, whose state is part of what a repeated step must find unchanged.
        self.group = broadcast_long(secrets.randbits(62), 0)
        self.write_event("formed", step=self.step, epoch=self.epoch)
        self._display.formed(rank=self.rank, world_size=self.world_size, step=self.step)

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - all ranks are of one mind
        """After each epoch."""
        return bool(self.sampler.cursor == 0)

    def write_event(self, kind: str, *, step: int, epoch: int, **fields: Any) -> None:
        """Writes an event with this worker's present place filled in."""
        self._events.write(
            kind, rank=self.rank, world_size=self.world_size, group=self.group, step=step, epoch=epoch, **fields
        )


class Coordinator(CoordinatorP2P):
    """Tells when a step is part of the model for good.

    Args:
        state: what is trained.
        on_commit: called then, with the step's number (from 0).
        **options: for `CoordinatorP2P`.
    """

    def __init__(self, state: Classifier, on_commit: Callable[[int], None], **options: Any) -> None:
        super().__init__(**options)
        self._state = state
        self._on_commit = on_commit

    def step_committed(self) -> None:
        """Called by the train loop; `ModelState.commit` comes too early, for it may still be taken back."""
        super().step_committed()
        self._on_commit(self._state.step - 1)


class Training:
    """One worker's data, state and train step.

    Args:
        options: the command line.
    """

    def __init__(self, options: Options) -> None:
        recipe = options.recipe
        index = _index(options)
        self.options = options
        self.recipe = recipe
        self.train_set = ImageDataset(
            index.train,
            TrainTransform(recipe.image_size, recipe.min_crop_area, recipe.max_stretch, recipe.flip),
            cache=recipe.cache,
        )
        self.val_set = ImageDataset(
            index.val, EvalTransform(recipe.image_size, recipe.kept_in_validation), cache=recipe.cache
        )
        self.device = _device()
        size = len(self.train_set)
        self.sampler = ElasticBatchSampler(size, recipe.batch_size, epochs=recipe.epochs, seed=options.seed)
        self.total_steps = recipe.epochs * self.sampler.batches_per_epoch
        self.loader = ElasticLoader(
            self.train_set, self.sampler, num_workers=recipe.num_data_workers, pin_memory=self.device.type == "cuda"
        )
        self.display = RunDisplay(self.total_steps, bar=options.progress)
        self.last_share, self.last_loss = BatchShare(0, 0, (), 0, 0), math.nan
        self.accuracy: Accuracy | None = None  # after the last epoch
        torch.manual_seed(options.seed)
        self.model = resnet(
            depth_of(recipe.arch),
            len(index.classes),
            width=recipe.width,
            small_images=recipe.image_size <= SMALL_IMAGE_EDGE,
        ).to(self.device)
        optimizer = torch.optim.SGD(
            self.model.parameters(), recipe.learning_rate, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay
        )
        self.state = Classifier(self.model, optimizer, self.sampler, EventWriter(options.events_dir), self.display)

    def train_step(self, state: Classifier) -> torchelastic.SimpleWorkerStats:
        """One step over this worker's part of the next batch; may fail anywhere and be repeated."""
        self._validate_between_epochs(state)
        started_s = time.monotonic()
        batch = next(self.loader)
        (share,) = self.sampler.pending
        # What was loaded, not what the sampler meant: the audit is worth something only then.
        state.write_event(
            "attempt",
            step=state.step,
            epoch=share.epoch,
            indices=tuple(batch.sample.tolist()[: share.local_samples]),
        )
        for parameters in state.optimizer.param_groups:
            parameters["lr"] = self._learning_rate(state.step)
        loss = F.cross_entropy(
            state.model(batch.pixels.to(self.device, non_blocking=True)),
            batch.label.to(self.device, non_blocking=True),
        )
        own_work_s = time.monotonic() - started_s  # the backward pass waits for the slowest, so it says nothing
        state.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        state.optimizer.step()
        self.last_share, self.last_loss = share, loss.item()
        return torchelastic.SimpleWorkerStats(len(batch.label) / own_work_s)

    def committed(self, step: int) -> None:
        """The last train step has succeeded and will not be undone."""
        share, loss = self.last_share, self.last_loss
        self.state.write_event("commit", step=step, epoch=share.epoch, loss=loss)
        self.display.committed(step=step + 1, epoch=share.epoch, loss=loss, images=share.global_samples)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            total_steps=self.total_steps,
            peak=self.recipe.learning_rate,
            warmup_steps=int(self.total_steps * WARMUP_FRACTION),
        )

    def _validate_between_epochs(self, state: Classifier) -> None:
        # Decided by the committed place in the data, which all workers share, so all take part. Before the step and not
        # after it: should a worker die in here, the last step is committed already and nothing is undone.
        epoch, batch_number = self.sampler.position
        if batch_number > 0 or epoch == 0:
            return
        accuracy = self._evaluate(state.rank, state.world_size)
        state.write_event("validated", step=state.step, epoch=epoch - 1, accuracy=accuracy.top1)
        self.display.validated(epoch=epoch - 1, step=state.step, top1=accuracy.top1, top5=accuracy.top5)
        if epoch == self.sampler.epochs:
            self.accuracy = accuracy

    def _evaluate(self, rank: int, world_size: int) -> Accuracy:
        return evaluate(
            self.model,
            self.val_set,
            rank=rank,
            world_size=world_size,
            batch_size=self.recipe.batch_size,
            device=self.device,
        )

    def finish(self) -> None:
        """After the run: rank 0 prints the result and writes the report."""
        self.display.close()
        self.loader.close()
        state = self.state
        if state.rank != 0:  # also one that came when the run was over already, and has trained nothing
            return
        # A peer that was through with the last validation may have ended the run before this worker was.
        final = self._evaluate(0, 1) if self.accuracy is None else self.accuracy
        print(
            f"done: top-1 {100 * final.top1:.2f} %, top-5 {100 * final.top5:.2f} % after {state.step} steps, "
            f"{self.sampler.epoch} epochs"
        )
        if self.options.output is not None:
            self._write_report(self.options.output, final)

    def _write_report(self, file: Path, final: Accuracy) -> None:
        ledger = None
        if self.options.events_dir is not None:
            events = read_events(self.options.events_dir)
            ledger = asdict(sample_ledger(events, images=len(self.train_set), epochs=self.recipe.epochs))
        report = {
            "top1": final.top1,
            "top5": final.top5,
            "steps": self.state.step,
            "epochs": self.sampler.epoch,
            "world_size": self.state.world_size,
            "images": len(self.train_set),
            "ledger": ledger,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps(report, indent=2) + "\n")
        scratch.replace(file)


class FreshStart(FileSystemCheckpointManager):
    """Sees no checkpoint that was there before it: `--no-resume`. Those of its own run it does see.

    Args:
        checkpoint_dir: the folder.
        keep: how many of its own to keep.
    """

    def __init__(self, checkpoint_dir: Path, *, keep: int) -> None:
        super().__init__(checkpoint_dir, keep=keep)
        self._earlier = frozenset(checkpoint.sequence_id for checkpoint in super().list_candidates())

    def list_candidates(self) -> list[FileSystemCheckpoint]:
        """This run's, newest first."""
        return [found for found in super().list_candidates() if found.sequence_id not in self._earlier]


def _index(options: Options) -> ImageIndex:
    if options.is_digits:
        write_digits(options.data)
    return index_images(options.data)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # By the place on this host: ranks follow the order of joining, so rank modulo GPUs puts two workers on one GPU.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _checkpoint_manager(options: Options) -> FileSystemCheckpointManager | None:
    if options.checkpoint_dir is None:
        return None
    kind = FileSystemCheckpointManager if options.resume else FreshStart
    return kind(options.checkpoint_dir, keep=KEPT_CHECKPOINTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains; every worker runs this."""
    options = parse_options(arguments)
    training = Training(options)
    coordinator = Coordinator(
        training.state,
        training.committed,
        c10d_backend=options.backend,
        init_method=options.init_method,
        process_group_timeout=PROCESS_GROUP_TIMEOUT_MS,
    )
    torchelastic.train(coordinator, training.train_step, training.state, checkpoint=_checkpoint_manager(options))
    training.finish()


if __name__ == "__main__":
    main()
