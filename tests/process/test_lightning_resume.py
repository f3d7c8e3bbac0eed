"""What a run of Lightning finds again when it goes on: the counters of its callbacks, and its place in the data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.process.lightning_memory_job import KilledAt, quiet_trainer, train
from tests.process.test_lightning_local import Model, data, trainer_at
from torchelastic.adapters.lightning import (
    LOCAL_CHECKPOINT,
    LocalCheckpointCallback,
    MemoryCheckpointCallback,
    wrap_trainer_and_auto_resume,
)
from torchelastic.data import ElasticBatchSampler, ElasticStream, EpochLoader, EpochStream

ROOT = Path(__file__).parents[2]

SAMPLES, BATCH, EPOCHS = 20, 4, 3
PER_EPOCH = SAMPLES // BATCH


@pytest.fixture
def folder(memory_folder: Path) -> Path:
    return memory_folder


# --- callbacks --------------------------------------------------------------------------------------------------------


class CountsBatches(Callback):
    """Its count is part of each checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_callbacks_behind_the_one_that_saves_in_memory_lose_no_batch_at_a_resume(folder: Path) -> None:
    train(folder / "job", CountsBatches(), max_steps=8)  # behind it, as in the docs
    counts = CountsBatches()
    resumed = train(folder / "job", counts)
    assert (resumed.resumed_from, resumed.seen) == ("step-6_ckpt", list(range(6, 12)))
    assert counts.count == 12


def test_callbacks_behind_the_one_that_saves_locally_lose_no_batch_at_a_resume(tmp_path: Path) -> None:
    quiet = {"enable_checkpointing": False}
    trainer_at(tmp_path, LocalCheckpointCallback(5), CountsBatches(), **quiet).fit(Model(), data())
    counts, model = CountsBatches(), Model()
    trainer_at(tmp_path, LocalCheckpointCallback(100), counts, **quiet).fit(model, data(), ckpt_path=LOCAL_CHECKPOINT)
    assert model.seen == [10, 11]
    assert counts.count == 12


# --- the place in the data --------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is i, so that batches show which samples were loaded."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Notes(LightningModule):
    """Notes the samples and the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[tuple[int, list[int], float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch / SAMPLES) - 1.0).square().mean()
        self.batches.append((int(self.trainer.global_step), [int(one) for one in batch], float(loss.detach())))
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def loader(**options: Any) -> EpochLoader:
    sampler = ElasticBatchSampler(SAMPLES, BATCH, epochs=EPOCHS, seed=5, drop_last=True)
    return EpochLoader(Numbers(), sampler, **options)


def numbers_of(shard: int, num_shards: int, position: int) -> Iterator[torch.Tensor]:
    for number in range(shard + num_shards * position, SAMPLES, num_shards):
        yield torch.tensor([float(number)])


def stream_loader(**options: Any) -> EpochStream:
    stream = ElasticStream(numbers_of, 2, global_batch_size=BATCH, epochs=EPOCHS, **options)
    return EpochStream(stream, fetched_ahead=1)


Loader = Callable[..., EpochLoader | EpochStream]


def fit(container: Path, *callbacks: Callback, max_steps: int = -1, data: Loader = loader, **options: Any) -> Notes:
    """Trains all epochs, or so many steps, from the newest checkpoint; one is saved at each step."""
    saving = MemoryCheckpointCallback(container, 1, keep_on_train_end=True)
    trainer: Trainer = quiet_trainer(saving, *callbacks, max_steps=max_steps, max_epochs=EPOCHS)
    auto_resume = wrap_trainer_and_auto_resume(trainer, container, async_save=False)
    model = Notes()
    trainer.fit(model, data(**options), ckpt_path=auto_resume.ckpt_path())
    return model


@pytest.mark.parametrize("data", [loader, stream_loader], ids=["index", "stream"])
def test_an_epoch_goes_on_where_it_was_interrupted(folder: Path, data: Loader) -> None:
    whole = fit(folder / "whole", data=data).batches
    assert [step for step, _, _ in whole] == list(range(EPOCHS * PER_EPOCH))
    for epoch in range(EPOCHS):
        parts = [ids for _, ids, _ in whole[epoch * PER_EPOCH :][:PER_EPOCH]]
        assert sorted(chain.from_iterable(parts)) == list(range(SAMPLES))
    for stop in (1, PER_EPOCH, PER_EPOCH + 1, 3 * PER_EPOCH - 1):
        assert fit(folder / f"{stop}", max_steps=stop, data=data).batches == whole[:stop]
        assert fit(folder / f"{stop}", data=data).batches == whole[stop:], f"interrupted after {stop} steps"
    assert fit(folder / "whole", data=data).batches == [], "it was over"


def test_after_the_durable_checkpoint_of_an_epoch_the_next_one_is_trained(folder: Path) -> None:
    durable = ModelCheckpoint(folder, save_top_k=-1)
    saving = MemoryCheckpointCallback(folder / "job", 1, enabled=False)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": EPOCHS}
    model = Notes()
    quiet_trainer(saving, durable, enable_checkpointing=True, **options).fit(model, loader())
    after = Notes()
    quiet_trainer(saving, **options).fit(after, loader(), ckpt_path=folder / f"epoch=0-step={PER_EPOCH}.ckpt")
    assert after.batches == model.batches[PER_EPOCH:]


@pytest.mark.long
@pytest.mark.parametrize("data", [loader, stream_loader], ids=["index", "stream"])
def test_what_worker_processes_have_loaded_ahead_is_not_counted(folder: Path, data: Loader) -> None:
    whole = fit(folder / "whole", data=data).batches
    fit(folder / "job", max_steps=7, data=data, num_workers=2)
    assert fit(folder / "job", data=data, num_workers=2).batches == whole[7:]


# --- what follows a step ----------------------------------------------------------------------------------------------


class Validated(Notes):
    """Notes at which steps it was validated, and is lost at the end of a validation, or at the end of an epoch."""

    def __init__(self, lost_in: str = "", at: int = -1) -> None:
        super().__init__()
        self.validated: list[int] = []
        self.lost_in, self.at = lost_in, at

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", (self.layer(batch / SAMPLES) - 1.0).square().mean())

    def on_validation_epoch_end(self) -> None:
        self._is_lost_in("validation")
        self.validated.append(int(self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self._is_lost_in("epoch")

    def _is_lost_in(self, hook: str) -> None:
        if (hook, int(self.trainer.global_step)) == (self.lost_in, self.at):
            raise KeyboardInterrupt


def fit_validated(folder: Path, model: Validated, every_n_steps: int, **options: Any) -> float:
    """Trains all epochs from the newest checkpoint in memory; returns the loss of the worst, which is kept durably."""
    durable = ModelCheckpoint(folder / "durable", "{step}", monitor="loss", mode="max", save_top_k=1)
    saving = MemoryCheckpointCallback(folder / "job", every_n_steps)
    options |= {"max_steps": -1, "max_epochs": EPOCHS, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    trainer: Trainer = quiet_trainer(durable, saving, **options)
    auto_resume = wrap_trainer_and_auto_resume(trainer, folder / "job", async_save=False)
    trainer.fit(model, loader(), torch.utils.data.DataLoader(Numbers(), SAMPLES), ckpt_path=auto_resume.ckpt_path())
    assert Path(durable.best_model_path).is_file()
    return float(durable.best_model_score or 0.0)


@pytest.mark.parametrize(
    ("lost_in", "at", "validates_each"),
    [("validation", 3, 3), ("validation", 5, 5), ("epoch", 5, 5), ("validation", 15, 5), ("epoch", 15, 5)],
)
def test_what_followed_a_step_is_done_when_the_run_goes_on(
    folder: Path, lost_in: str, at: int, validates_each: int
) -> None:
    whole = Validated()
    worst = fit_validated(folder / "whole", whole, every_n_steps=100, val_check_interval=validates_each)
    with pytest.raises(SystemExit):
        fit_validated(folder, Validated(lost_in, at), every_n_steps=1, val_check_interval=validates_each)
    after = Validated()
    assert fit_validated(folder, after, every_n_steps=1, val_check_interval=validates_each) == worst
    assert after.batches == whole.batches[at - 1 :]
    assert after.validated == [one for one in whole.validated if one >= at]
    assert not (folder / "job").exists(), "the run is over"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_in_its_epoch_also_with_another_number_of_ranks(folder: Path) -> None:
    step = PER_EPOCH + 2
    first = launch(folder, step, ranks=2)
    assert first.returncode == 1
    assert "Signal 9 (SIGKILL)" in first.stdout
    before = noted(folder)
    assert max(before) == step - 1
    assert all(len(before[one]) == BATCH for one in range(step))
    second = launch(folder, -1, ranks=1)
    assert second.returncode == 0, second.stdout[-3000:]
    after = noted(folder, "after-")
    assert sorted(after) == list(range(step, EPOCHS * PER_EPOCH)), "from the last complete step on"
    both = {**before, **after}
    for epoch in range(EPOCHS):
        steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        assert sorted(chain.from_iterable(both[one] for one in steps)) == list(range(SAMPLES)), "each sample once"


def launch(folder: Path, killed_at: int, ranks: int) -> subprocess.CompletedProcess[str]:
    """Start this file as a script of torchrun; rank 1 is killed at a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.process.test_lightning_resume", str(folder), str(killed_at)]
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "TORCHELASTIC_RUN_ID": "resume"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )


def noted(folder: Path, kind: str = "before-") -> dict[int, list[int]]:
    """The samples of each step, of all ranks."""
    found: dict[int, list[int]] = {}
    for path in folder.glob(f"{kind}*"):
        for step, ids in re.findall(r"(\d+): ([\d ]*)", path.read_text()):
            found.setdefault(int(step), []).extend(map(int, ids.split()))
    return found


class Writes(Callback):
    """Writes down which samples were trained, once their step is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Notes, *arguments: Any) -> None:  # type: ignore[override]
        step, ids, _ = pl_module.batches[-1]
        with self.path.open("a") as file:
            file.write(f"{step}: {' '.join(map(str, ids))}\n")


def main() -> None:
    folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "before" if killed_at >= 0 else "after"
    callbacks: list[Callback] = [Writes(folder / f"{kind}-{rank}")]
    if rank == 1:
        callbacks.append(KilledAt(killed_at))
    saving = MemoryCheckpointCallback(folder / "job", 1, keep_on_train_end=True)
    options = {"devices": size, "strategy": "ddp"} if size > 1 else {}
    trainer = quiet_trainer(saving, *callbacks, max_steps=-1, max_epochs=EPOCHS, **options)
    auto_resume = wrap_trainer_and_auto_resume(trainer, folder / "job", async_save=False)
    trainer.fit(Notes(), loader(), ckpt_path=auto_resume.ckpt_path())


if __name__ == "__main__":
    main()
