"""What the ranks of tests/process/test_transformers_memory.py do: real trainers, on the CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.utils import logging as transformers_logging

from tests.process.log_ears import heard
from torchelastic.adapters.hugging_face.rank_state import rng_state
from torchelastic.adapters.transformers import MemoryCheckpointCallback, resume_path

STEPS = 12
EPOCH_STEPS = 5


@dataclass(frozen=True)
class Run:
    """One start of a training program.

    Attributes:
        folder: of the Trainer's durable checkpoints.
        base: the container in memory.
        every: optimizer steps from one checkpoint in memory to the next; 0: without the callback.
        kill_at: the step that is begun by a SIGKILL of rank 0, when the save before is through; after the last step:
            when the last epoch has ended.
        batch_norm: a model with buffers that differ from rank to rank, in place of one with tied weights.
        stop_at: the step at which something asks the Trainer to stop.
        logged: what a callback adds to the Trainer's history in step 3.
        fails_at: the steps whose save rank 0 or 1 cannot make: a step and a rank.
        knows_trainer: whether the callback is told which Trainer it is that resumes.
        arguments: of the Trainer.
    """

    folder: str
    base: str
    every: int = 2
    kill_at: int | None = None
    batch_norm: bool = False
    stop_at: int | None = None
    logged: Mapping[Any, Any] = field(default_factory=dict)
    fails_at: tuple[tuple[int, int], ...] = ()
    knows_trainer: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a rank has seen.

    Attributes:
        resumed_from: what the Trainer was given.
        first_step: of the steps that were taken.
        digest: of all weights and buffers at the end.
        counted: the steps that a callback has counted which is restored from the checkpoint.
        was_tidy: whether the folder it was given was gone after the first step, if it was made from memory.
        warnings: of this library.
        failures: of saves.
        history: what was logged in step 3.
    """

    resumed_from: str | None
    first_step: int
    digest: str
    counted: int
    was_tidy: bool
    warnings: tuple[str, ...]
    failures: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = torch.nn.Dropout(0.2)
        self.out = torch.nn.Linear(6, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1)).unflatten(0, input_ids.shape)
        logits = self.out(self.dropout(hidden))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Events(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Kills, stops, and notes where training begins."""

    def __init__(self, run: Run, memory: MemoryCheckpointCallback | None) -> None:
        self.run, self.memory = run, memory
        self.first_step, self.was_tidy = -1, True
        self.path: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0 and dist.is_initialized():
            torch.manual_seed(100 + dist.get_rank())  # else dropout is the same on all ranks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first_step == -1:
            self.first_step = state.global_step
        elif self.path is not None and self.path.startswith(self.run.base):
            self.was_tidy = self.was_tidy and not Path(self.path).exists()
        self._kill_if_due(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STEPS:
            self._kill_if_due(args, state)

    def _kill_if_due(self, args: Any, state: Any) -> None:
        if state.global_step == self.run.kill_at:
            if self.memory is not None and self.memory._tier is not None:
                self.memory._tier.wait()
            if args.process_index == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.run.stop_at:
            control.should_training_stop = True
        if state.global_step == 3 and self.run.logged:
            state.log_history.append({**self.run.logged, "step": 3})


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
    """Has a state that a Trainer can restore."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


def model_of(run: Run) -> torch.nn.Module:
    torch.manual_seed(1)
    if run.batch_norm:
        return Normed()
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(16, (count, 6), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(run: Run, *callbacks: TrainerCallback) -> Trainer:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments = {
        "output_dir": run.folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // ranks,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 3,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
        **run.arguments,
    }
    return Trainer(
        model=model_of(run),
        args=TrainingArguments(**arguments),
        train_dataset=samples(4 * EPOCH_STEPS),
        eval_dataset=samples(4),
        callbacks=list(callbacks),
    )


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(run: Run) -> Outcome:
    """The training program: a user's own, with one line more."""
    run = _begin(run)
    memory = MemoryCheckpointCallback(run.base, run.every) if run.every else None
    events = Events(run, memory)
    trainer = trainer_of(run, *([memory] if memory else []), events, Counting())
    with heard() as warnings:
        path = memory.resume_from_checkpoint(trainer if run.knows_trainer else None) if memory else None
        events.path = path
        with patch("torchelastic.adapters.transformers.rng_state", lambda: random_numbers(run, trainer)):
            trainer.train(resume_from_checkpoint=path)
    (counting,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Counting))
    return Outcome(
        path,
        events.first_step,
        digest_of(trainer.model),
        counting.count,
        events.was_tidy,
        tuple(warnings),
        () if memory is None else tuple(memory.failures),
        tuple(entry for entry in trainer.state.log_history if entry["step"] == 3 and "loss" not in entry),
    )


def random_numbers(run: Run, trainer: Trainer) -> Any:
    """As it is, where a save does not fail."""
    if (trainer.state.global_step, dist.get_rank() if dist.is_initialized() else 0) in run.fails_at:
        raise KeyError("no random numbers")
    return rng_state()


def look(run: Run) -> tuple[str | None, dict[str, Any]]:
    """What a Trainer would resume from: the path, and what is in the files that hold no tensors alone."""
    run = _begin(run)
    path = resume_path(trainer_of(run), run.base)
    content: dict[str, Any] = {}
    for file in sorted(Path(path).iterdir()) if path else ():
        if file.suffix in (".pt", ".pth") and Path(run.base) in file.parents:
            content[file.name] = _without_tensors(torch.load(file, weights_only=True))
        elif file.suffix == ".json":
            content[file.name] = json.loads(file.read_text())
    return path, content


def _without_tensors(value: Any) -> Any:
    """To be sent by a process that ends."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    return type(value)(map(_without_tensors, value)) if type(value) in (list, tuple) else value


def _begin(run: Run) -> Run:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers_logging.set_verbosity(logging.ERROR)
    host = os.environ.get("TORCHELASTIC_FAILURE_DOMAIN")  # where the test has several hosts on this machine
    if host is not None:
        run = replace(run, base=f"{Path(run.base).parent}/{host}/{Path(run.base).name}")
    return run
