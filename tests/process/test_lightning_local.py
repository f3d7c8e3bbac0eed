"""Real trainers on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from tests.process.local_ranks import crew_of, succeeded
from torchelastic.adapters.lightning import (
    LOCAL_CHECKPOINT,
    HierarchicalCheckpointIO,
    LocalCheckpointCallback,
)
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

STEPS = 12
PER_EPOCH = 4


class Model(LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, width)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(int(self.trainer.global_step))
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class KilledAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def data() -> DataLoader[Any]:
    """Equal batches, because a trainer that goes on in the middle of an epoch begins with its first batch."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(2, 4, generator=generator).repeat(PER_EPOCH, 1)), batch_size=2)


def global_step_of(path: Any) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


def trainer_at(folder: Path, *callbacks: Callback, async_save: bool = False, **options: Any) -> Trainer:
    manager = LocalCheckpointManager(folder / "local", timeout_s=30)
    plugin = HierarchicalCheckpointIO(TorchCheckpointIO(), manager, global_step_of, async_save)
    options = {"max_steps": STEPS, "accelerator": "cpu", "devices": 1, **options}
    return Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        plugins=[plugin],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def plugin_of(trainer: Trainer) -> HierarchicalCheckpointIO:
    plugin = trainer.strategy.checkpoint_io
    assert isinstance(plugin, HierarchicalCheckpointIO)
    return plugin


def weights_without_interruption(folder: Path) -> torch.Tensor:
    model = Model()
    trainer_at(folder / "plain", enable_checkpointing=False).fit(model, data())
    return model.layer.weight.detach()


def latest(folder: Path) -> int:
    return LocalCheckpointManager(folder / "local").find_latest()


class Counting(torch.nn.Linear):
    """Of a second version, which brings the weights of the first one up to date; a buffer of it grows."""

    _version = 2
    counted: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("counted", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.counted = torch.cat([self.counted, torch.ones(1)])
        return super().forward(inputs) * self.counted.sum()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Thawing(BaseFinetuning):
    """Freezes the layer's bias at each start, and trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.layer.bias.requires_grad_(False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            pl_module.layer.bias.requires_grad_(True)


def test_what_the_run_has_changed_beside_the_weights_is_there_when_it_goes_on(tmp_path: Path) -> None:
    def model() -> Model:
        one = Model()
        one.layer = Counting()
        return one

    torch.manual_seed(1)
    whole, first, second = model(), model(), model()
    first.layer.load_state_dict(whole.layer.state_dict())
    trainer_at(tmp_path / "whole", Thawing(), enable_checkpointing=False).fit(whole, data())
    saving = LocalCheckpointCallback(6)
    trainer_at(tmp_path, Thawing(), saving, max_steps=9, enable_checkpointing=False).fit(first, data())
    trainer_at(tmp_path, Thawing(), LocalCheckpointCallback(100), enable_checkpointing=False).fit(
        second, data(), ckpt_path=LOCAL_CHECKPOINT
    )
    assert second.seen[0] > PER_EPOCH
    assert whole.layer.state_dict().keys() == second.layer.state_dict().keys()
    assert all(torch.equal(value, second.layer.state_dict()[name]) for name, value in whole.layer.state_dict().items())


@pytest.mark.parametrize("async_save", [False, True])
def test_the_trainer_saves_every_n_steps_and_goes_on_from_there(tmp_path: Path, async_save: bool) -> None:
    trainer = trainer_at(tmp_path, LocalCheckpointCallback(5), async_save=async_save, enable_checkpointing=False)
    trainer.fit(Model(), data())
    assert latest(tmp_path) == 10
    model = Model()
    trainer_at(tmp_path, LocalCheckpointCallback(100), enable_checkpointing=False).fit(
        model, data(), ckpt_path=LOCAL_CHECKPOINT
    )
    assert model.seen == [10, 11]
    assert torch.equal(model.layer.weight, weights_without_interruption(tmp_path))


def test_no_half_accumulated_gradients_are_left_out_by_a_save_at_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    clock = count()
    callback = LocalCheckpointCallback(train_time_interval=timedelta(seconds=2), clock=lambda: float(next(clock)))
    trainer = trainer_at(tmp_path, callback, enable_checkpointing=False, accumulate_grad_batches=2)
    monkeypatch.setattr(callback, "_save", lambda trainer, *_: batches.append(trainer.fit_loop.batch_idx + 1))
    trainer.fit(Model(), data())
    assert set(batches) == {2}, "at the end of a step, and not at that of an epoch"


@pytest.mark.long
def test_a_killed_run_goes_on_from_the_local_checkpoint_if_it_is_newer(tmp_path: Path) -> None:
    code = f"from tests.process import test_lightning_local as it; it.train_and_die(it.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    (durable,) = (tmp_path / "durable").glob("*.ckpt")
    assert (global_step_of(durable), latest(tmp_path)) == (4, 6)
    model = Model()
    trainer = trainer_at(tmp_path, LocalCheckpointCallback(100), enable_checkpointing=False)
    trainer.fit(model, data(), ckpt_path=durable)
    assert model.seen == list(range(6, STEPS))
    assert torch.equal(model.layer.weight, weights_without_interruption(tmp_path))


def train_and_die(folder: Path) -> None:
    durable = ModelCheckpoint(folder / "durable", every_n_train_steps=4, save_top_k=-1)
    trainer = trainer_at(folder, LocalCheckpointCallback(3), durable, KilledAt(7))
    trainer.fit(Model(), data())


def test_the_durable_checkpoint_is_loaded_if_it_is_newer_or_to_test(tmp_path: Path) -> None:
    durable = ModelCheckpoint(tmp_path / "durable", every_n_train_steps=4, save_top_k=-1)
    trainer_at(tmp_path, LocalCheckpointCallback(5), durable).fit(Model(), data())
    assert latest(tmp_path) == 10
    found = {global_step_of(path): path for path in (tmp_path / "durable").glob("*.ckpt")}
    assert sorted(found) == [4, 8, 12], "local saves have replaced none of them"
    newer = trainer_at(tmp_path, LocalCheckpointCallback(100))
    assert plugin_of(newer).load_checkpoint(found[12])["global_step"] == 12
    assert plugin_of(newer).load_checkpoint(found[8])["global_step"] == 10
    plugin_of(newer).get_global_ckpt_iteration_fn = lambda _: 10
    assert plugin_of(newer).load_checkpoint(found[12])["global_step"] == 10, "of equals the local one"
    callback = LocalCheckpointCallback(100)
    callback.setup(newer, None, "test")
    assert plugin_of(newer).load_checkpoint(found[8])["global_step"] == 8


def test_importing_the_adapter_imports_no_lightning() -> None:
    code = "import sys, torchelastic.adapters.lightning; print('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.long
def test_all_ranks_of_a_distributed_trainer_save_and_load(tmp_path: Path) -> None:
    with crew_of(2) as crew:
        assert succeeded(crew.run(train_distributed, tmp_path, None, 6, ranks=2)) == [[5, 1], [5, 1]]
        assert succeeded(crew.run(train_distributed, tmp_path, LOCAL_CHECKPOINT, 8, ranks=2)) == [[7, 1], [7, 1]]


@pytest.mark.long
def test_the_durable_checkpoint_is_loaded_where_the_newer_local_one_is_that_of_another_number_of_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with crew_of(2) as crew:
        succeeded(crew.run(save_locally, tmp_path, ranks=2))
    durable = tmp_path / "durable.ckpt"
    torch.save({"global_step": 4}, durable)
    plugin = plugin_of(trainer_at(tmp_path, LocalCheckpointCallback(100)))
    assert plugin.load_checkpoint(durable)["global_step"] == 4
    assert "step 10: the local checkpoint is skipped" in caplog.text
    with pytest.raises(CheckpointError, match="was saved by 2 rank"):
        plugin.load_checkpoint(LOCAL_CHECKPOINT)


def save_locally(folder: Path) -> None:
    manager = LocalCheckpointManager(folder / "local", timeout_s=30)
    manager.save(BasicTensorAwareStateDict({"global_step": 10}), 10)


def train_distributed(folder: Path, ckpt_path: str | None, max_steps: int) -> list[int]:
    """Returns the step of the newest local checkpoint, and how many shards this rank has."""
    rank = dist.get_rank()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    trainer = trainer_at(
        folder,
        LocalCheckpointCallback(2),
        async_save=True,
        max_steps=max_steps,
        devices=2,
        strategy="ddp",
        enable_checkpointing=False,
    )
    model = Model()
    trainer.fit(model, data(), ckpt_path=ckpt_path)
    assert ckpt_path is None or model.seen[0] == 5
    manager = plugin_of(trainer).local_ckpt_manager
    assert isinstance(manager, LocalCheckpointManager)
    return [manager.latest_iteration, len(list(manager.local_ckpt_dir.glob(f"step-*/shard-{rank:05d}-of-00002.shard")))]
