"""Trainings that tests of checkpoints in memory run, here or in the ranks of a crew."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from torchelastic.adapters.lightning import MemoryCheckpointCallback, wrap_trainer_and_auto_resume
from torchelastic.adapters.lightning.memory import memory_io_of

PER_EPOCH = 4


class Batches:
    """Other batches on every rank; goes on in the middle of an epoch, as a stateful data loader does."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.at = rank, 0

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.at %= PER_EPOCH
        while self.at < PER_EPOCH:
            self.at += 1
            yield [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * self.rank + self.at))]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))


class Model(LightningModule):
    def __init__(self, width: int = 3, is_sharded: bool = False) -> None:
        super().__init__()
        self.is_sharded = is_sharded
        self.net = network()
        self.seen: list[int] = []

    def configure_model(self) -> None:
        if self.is_sharded and self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(int(self.trainer.global_step))
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Migrated(torch.nn.Linear):
    """Its second version has another sign, and brings states of the first one up to date."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Growing(Model):
    """A branch of it comes in at step 8, and a buffer that is in no `state_dict` counts the steps."""

    counted: torch.Tensor

    def __init__(self, width: int = 3, is_sharded: bool = False, strict: bool = True) -> None:
        super().__init__(width, is_sharded)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        self.late = Migrated(3, 3)
        self.register_buffer("counted", torch.zeros(1), persistent=False)
        self.strict_loading = strict

    def configure_model(self) -> None:
        super().configure_model()
        if self.is_sharded and self.device_mesh is not None:
            fully_shard(self.late, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.counted += 1
        self.seen.append(int(self.trainer.global_step))
        output = self.net(batch[0])
        if self.seen[-1] >= 8:
            output = output + self.late(output) * self.counted
        return output.square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.net.parameters(), *self.late.parameters()], lr=0.1)


class Trained(Model):
    """Its optimizer has what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([one for one in self.net.parameters() if one.requires_grad], lr=0.1)


class GrowingLoosely(Growing):
    """The same with `strict_loading=False`."""

    def __init__(self, width: int = 3, is_sharded: bool = False) -> None:
        super().__init__(width, is_sharded, strict=False)


class KilledAt(Callback):
    """Is killed in the middle, when what was saved before is complete."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.step:
            memory_io_of(trainer).tier.wait()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """What a rank answers.

    Attributes:
        resumed_from: the name of the checkpoint that it went on from.
        seen: global steps that it trained.
        weights: parameters and buffers, whole.
        optimizer: of Adam's state, whole.
    """

    resumed_from: str | None
    seen: list[int]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def train_ranks(folder: Path, hosts: int = 1, killed_at: int = -1, *callbacks: Callback, **options: Any) -> Outcome:
    """Trains on this rank of a crew; every rank is on a host of its own if there are as many hosts as ranks.

    Args:
        folder: each host has its folder in it.
        hosts: 1, or the number of ranks.
        killed_at: the step at which rank 1 is killed.
        callbacks: further ones.
        options: as for `train`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    host = f"host{rank}" if hosts > 1 else "host0"
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = host
    killing = [KilledAt(killed_at)] if killed_at >= 0 and rank == 1 else []
    return train(
        folder / host / "job", *killing, *callbacks, devices=size, strategy=options.pop("strategy", "ddp"), **options
    )


def train(
    container: Path,
    *callbacks: Callback,
    every_n_steps: int = 3,
    async_save: bool = True,
    keep: bool = True,
    kind: type[Model] = Model,
    **options: Any,
) -> Outcome:
    """Trains, from the checkpoint in memory if there is one. Options are the trainer's."""
    is_sharded = options.get("strategy") == "fsdp2"
    if is_sharded:
        options["strategy"] = ModelParallelStrategy(data_parallel_size=options["devices"], tensor_parallel_size=1)
    saving = MemoryCheckpointCallback(container, every_n_steps, keep_on_train_end=keep)
    trainer = quiet_trainer(saving, *callbacks, **options)
    auto_resume = wrap_trainer_and_auto_resume(trainer, container, async_save)
    model = kind(is_sharded=is_sharded)
    path = auto_resume.ckpt_path()
    trainer.fit(model, Batches(trainer.global_rank), ckpt_path=path)
    state = trainer.optimizers[0].state
    optimizer = {
        f"{index}/{key}": whole(value)
        for index, parameter in enumerate(model.parameters())
        for key, value in state[parameter].items()
    }
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return Outcome(None if path is None else Path(path).name, model.seen, weights, optimizer)


def quiet_trainer(*callbacks: Callback, **options: Any) -> Any:
    """A trainer on the CPU that prints nothing and saves nothing by itself."""
    settings = {"max_steps": 12, "devices": 1, "enable_checkpointing": False, **options}
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()  # type: ignore[no-any-return]
