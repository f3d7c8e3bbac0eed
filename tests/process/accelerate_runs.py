"""What the ranks of tests/process/test_accelerate_memory.py do: a training loop of somebody who uses Accelerate."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped, unused-ignore]
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.adapters.accelerate import MemoryCheckpointer
from torchelastic.adapters.hugging_face.rank_state import RankState, rng_state, save_step, split_model, tensors_of
from torchelastic.adapters.memory_tier import StorageTier
from torchelastic.checkpoint.errors import CheckpointError

EPOCHS, EPOCH_STEPS = 3, 4
#: Batches of the loop that accumulates.
ACCUMULATED = 12


@dataclass(frozen=True)
class Run:
    """One start of the program.

    Attributes:
        base: the container in memory; "": no checkpoints.
        kill_at: the step that is begun by a SIGKILL of rank 0, when the save before is through.
        async_save: of the checkpointer.
        models: how many are prepared.
    """

    base: str
    kill_at: int | None = None
    async_save: bool = True
    models: int = 2


@dataclass(frozen=True)
class Outcome:
    """What a rank has seen.

    Attributes:
        loaded: the step that was loaded.
        extra: what was saved with it.
        losses: of the steps of this start.
        digest: of all states at the end.
        seen: what the registered object has counted.
    """

    loaded: int | None
    extra: dict[str, Any]
    losses: tuple[float, ...]
    digest: str
    seen: int


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.seen = torch.zeros((), dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "unit": ("batches", 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["unit"] == ("batches", 1)
        self.seen = state["seen"]


class Training:
    """The state of the loop; the order of its data depends on a seed that is another one in each process."""

    def __init__(self, run: Run, seed: int = 0) -> None:
        order = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=order)
        rank = self.accelerator.process_index
        torch.manual_seed(1)
        models = [
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)),
            torch.nn.Linear(8, 1),
        ]
        self.models = [self.accelerator.prepare(model) for model in models[: run.models]]
        optimizer = torch.optim.AdamW([weight for model in models for weight in model.parameters()], lr=0.05)
        inputs = torch.randn(8 * EPOCH_STEPS, 4, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(TensorDataset(inputs), batch_size=8 // self.accelerator.num_processes, shuffle=True)
        self.optimizer = self.accelerator.prepare(optimizer)
        self.scheduler = self.accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(seed)
        self.loader = self.accelerator.prepare(loader)
        torch.manual_seed(100 * seed + rank)

    def step(self, batch: torch.Tensor) -> float:
        hidden = batch
        for model in self.models:
            hidden = model(hidden)
        loss = hidden.square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.seen += 1
        return float(loss.detach())

    def digest(self) -> str:
        digest = hashlib.sha256(repr(self.scheduler.get_last_lr()).encode())
        states = [self.accelerator.unwrap_model(model).state_dict() for model in self.models]
        for state in [*states, *self.optimizer.state_dict()["state"].values()]:
            for value in state.values():
                digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()


def train(run: Run, seed: int) -> Outcome:
    """The program.

    Args:
        run: this start.
        seed: of the process; the first start's decides the order of the data of all.
    """
    run = _on_this_host(run)
    training = Training(run, seed)
    memory = MemoryCheckpointer(training.accelerator, run.base, async_save=run.async_save) if run.base else None
    loaded = memory.load() if memory else None
    extra = memory.extra if memory else {}
    done = loaded or 0
    losses: list[float] = []
    for epoch in range(done // EPOCH_STEPS, EPOCHS):
        skipped = done - epoch * EPOCH_STEPS
        loader = accelerate.skip_first_batches(training.loader, skipped) if skipped else training.loader
        loader.set_epoch(epoch)
        for (batch,) in loader:
            if memory is not None and not losses and skipped:
                memory.restore_random_numbers()
            if done == run.kill_at:
                if memory is not None:
                    memory.wait()
                if training.accelerator.is_main_process:
                    os.kill(os.getpid(), signal.SIGKILL)
            losses.append(training.step(batch))
            done += 1
            if memory is not None and done % 2 == 0:
                memory.save(done, epoch=epoch, note="after step", weights=torch.full((2,), float(done)))
    if memory is not None:
        memory.remove()
    return Outcome(loaded, _plain(extra), tuple(losses), training.digest(), int(training.counter.seen))


def accumulate(base: str, until: int) -> tuple[int | None, list[float]]:
    """A loop that accumulates over 4 batches of 8 samples, and saves at a batch, which may be inside of that; or ends.

    Returns:
        What was loaded, and the weights.
    """
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(4, 1)
    plain, inputs = model, torch.randn(8 * ACCUMULATED, 4, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(TensorDataset(inputs), batch_size=8 // accelerator.num_processes),
    )
    with MemoryCheckpointer(accelerator, base) as memory:
        loaded = memory.load()
        done = loaded or 0
        for (batch,) in accelerate.skip_first_batches(loader, done) if done else loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == until:
                memory.save(done)
                break
    return loaded, [*plain.weight.flatten().tolist(), plain.bias.item()]


def with_positions(base: str, until: int, *, skips: bool) -> list[float]:
    """A loop over a dataloader that keeps its position itself: what it has seen until it saved, or until its end."""
    order = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=order)
    torch.manual_seed(1)
    model, data = torch.nn.Linear(1, 1), TensorDataset(torch.arange(20.0).reshape(20, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=2, shuffle=True)
    )
    seen: list[float] = []
    with MemoryCheckpointer(accelerator, base) as memory:
        done = memory.load() or 0
        for epoch in range(done // len(loader), 2):
            skipped = done - epoch * len(loader)
            batches = accelerate.skip_first_batches(loader, skipped) if skipped and skips else loader
            batches.set_epoch(epoch)
            for (batch,) in batches:
                seen += batch.flatten().tolist()
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == until:
                    memory.save(done)
                    return seen
    return seen


def with_ddp(base: str, *, saves: bool) -> tuple[list[float], list[bool]]:
    """Saves with buffers that DDP does not keep equal, one layer thawed and another frozen since; or loads that.

    Returns:
        The buffers of this rank, and which layers are trained.
    """
    kept = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[kept])
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    plain[0].requires_grad_(False)
    model = accelerator.prepare(plain)
    with MemoryCheckpointer(accelerator, base) as memory:
        if saves:
            model(torch.randn(4, 2) + accelerator.process_index)
            plain[0].requires_grad_(True)
            plain[2].requires_grad_(False)
            memory.save(1)
        else:
            memory.load()
    trained = [all(one.requires_grad for one in layer.parameters()) for layer in plain]
    return [float(value) for value in plain[1].running_mean], trained  # type: ignore[union-attr]


def load_of_before(base: str) -> tuple[str, str, int]:
    """Saves what 1.0.0a1 saved at first, with optimizers by position and nothing beside `state_dict`s; loads it."""
    training = Training(Run(base), 1)
    training.step(torch.ones(8, 4))
    accelerator = training.accelerator
    models = [split_model(accelerator.unwrap_model(model)) for model in accelerator._models]
    saved = RankState(
        {
            "parameters": [parameters for parameters, _ in models],
            "optimizers": [optimizer.state_dict() for optimizer in accelerator._optimizers],
        },
        {
            "buffers": [buffers for _, buffers in models],
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "objects": [one.state_dict() for one in accelerator._custom_objects],
            "dataloaders": [{"iteration": 0} for _ in accelerator._dataloaders],
            "scaler": accelerator.scaler.state_dict(),
            "step": 0,
            "extra": {},
        },
        {"rng": rng_state(), "dataloaders": [None for _ in accelerator._dataloaders]},
    )
    tier = StorageTier(base, async_save=False)
    save_step(tier, 1, lambda: tensors_of(saved, 0))
    tier.end()
    again = Training(Run(base), 2)
    with MemoryCheckpointer(again.accelerator, base) as memory:
        memory.load()
    return training.digest(), again.digest(), int(again.counter.seen)


def load_with_one_model_less(run: Run) -> str:
    """What is said when the program has changed."""
    run = _on_this_host(run)
    training = Training(replace(run, models=1))
    with MemoryCheckpointer(training.accelerator, run.base) as memory:
        try:
            memory.load()
        except CheckpointError as error:
            return str(error)
    return "loaded"


def save_what_cannot_be_saved(run: Run) -> str:
    """What is said of a value that is none."""
    training = Training(run)
    with MemoryCheckpointer(training.accelerator, run.base) as memory:
        try:
            memory.save(1, logger=training)
        except TypeError as error:
            return str(error)
    return "saved"


def offered(base: str) -> list[list[str]]:
    """What this rank gives to DCP: of two tensors that all ranks have, and when rank 1 has one more."""
    given: list[list[str]] = []

    class Noting(StorageTier):
        def save(self, checkpoint_id: str, tensors: Any) -> None:
            given.append(sorted(tensors))

    tier = Noting(_on_this_host(Run(base)).base, async_save=False, timeout_s=30)
    equal = {
        "replicated/a": torch.zeros(9),
        "replicated/b": torch.zeros(8),
        f"rank-{tier.ranks.rank}/x": torch.zeros(1),
    }
    save_step(tier, 1, lambda: equal)
    save_step(tier, 2, lambda: {**equal, "replicated/c": torch.zeros(1)} if tier.ranks.rank == 1 else equal)
    tier.close()
    return given


def _plain(extra: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in extra.items()}


def _on_this_host(run: Run) -> Run:
    host = os.environ.get("TORCHELASTIC_FAILURE_DOMAIN")
    if host is None or not run.base:
        return run
    return replace(run, base=f"{Path(run.base).parent}/{host}/{Path(run.base).name}")
