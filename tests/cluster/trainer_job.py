"""A script of Transformers' Trainer as its users write them, with faults: see `test_elastic_trainer.py`."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import torchelastic
from tests.cluster.elastic_job import EventLog
from torchelastic.adapters.elastic_trainer import ElasticTrainer
from torchelastic.checkpoint import DiskTier, EverySteps, MemoryTier, TieredCheckpointManager
from torchelastic.lifetime import StoppedEarly
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.testing.faults import FaultPlan

SAMPLES, EPOCHS = 40, 4
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "steps", "evaluated")


class Told(TrainerCallback):
    """Writes down what callbacks are told."""

    def __init__(self, log: EventLog, plan: FaultPlan) -> None:
        self._log, self._plan = log, plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del control
        self._log("begins", rank=args.process_index, world=args.world_size, is_zero=state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self._log("step", step=state.global_step, incarnation=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        kept = {name: (logs or {}).get(name) for name in LOGGED}
        self._log("log", step=state.global_step, **{name: value for name, value in kept.items() if value is not None})
        self._plan.reach("log", state.global_step, args.process_index)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._plan.reach("save", state.global_step, args.process_index)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._plan.reach("optimizer", state.global_step, args.process_index)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log("epoch", step=state.global_step)
        self._plan.reach("epoch", state.global_step, args.process_index)


class Counting(TrainerCallback, ExportableState):
    """Counts from the beginning, in a state that the Trainer saves."""

    steps: int | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.steps is not None
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Trainer(ElasticTrainer):
    """Says where it is."""

    plan: FaultPlan
    log_of_job: EventLog
    wait_for: int
    step_s: float
    counts: dict[str, int]
    drawn: list[Any]
    calls = 0  # of training_step, in the step under way
    elastic_attributes = ("counts",)

    def get_batch_samples(self, *arguments: Any) -> Any:
        drawn = super().get_batch_samples(*arguments)
        self.drawn, self.calls = list(drawn[0][0]), 0
        if self.state.global_step >= self.state.max_steps // 2 and self.args.world_size < self.wait_for:
            time.sleep(0.7)  # a run gives up after 100 failures
            raise torchelastic.RetryableException("waits for a newcomer")
        time.sleep(self.step_s)
        return drawn

    has_own_loss = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.plan.reach("forward", self.state.global_step, self.args.process_index)
        self.counts["evaluated"] += not model.training
        if num_items_in_batch is None or not self.has_own_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)  # not multiplied by the number of ranks
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _save_rng_state(self, output_dir: str) -> None:
        self.plan.reach("half a save", self.state.global_step, self.args.process_index)
        super()._save_rng_state(output_dir)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert len(inputs["input_ids"]) <= self.args.per_device_train_batch_size, "a micro batch, as with accumulation"
        self.calls += 1
        if self.calls < len(self.drawn):
            return loss
        self.counts["steps"] += 1
        self.plan.reach("backward", self.state.global_step, self.args.process_index)
        samples = [row for part in self.drawn if part.samples for row in part.inputs["input_ids"].tolist()]
        round_ = this_worker().position().round
        self.log_of_job("trained", step=self.state.global_step, round=round_, samples=samples)
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        name = "evaluated" if "eval_loss" in logs else "steps"
        super().log(logs | {name: self.counts.pop(name, 0)}, *arguments, **options)

    def _evaluate(self, *arguments: Any, **options: Any) -> Any:
        self.plan.reach("evaluate", self.state.global_step, self.args.process_index)
        return super()._evaluate(*arguments, **options)


def make_data(is_classified: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(16, (SAMPLES, 6), generator=generator)
    lengths = torch.randint(2, 7, (SAMPLES, 1), generator=generator)
    labels = rows[:, 0] % 2 if is_classified else rows.masked_fill(torch.arange(6) >= lengths, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def make_model(is_classified: bool) -> torch.nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "num_labels": 2,
    }
    dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = GPT2Config(**sizes, **dropout, **tokens)
    torch.manual_seed(0)
    if not is_classified:
        return GPT2LMHeadModel(config).double()
    from transformers import GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(config).double()  # takes num_items_in_batch, and does not use it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classified", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from half of the steps on")
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--own-loss", action="store_true")
    parser.add_argument("--late", action="store_true", help="who is started again waits until the others have ended")
    parser.add_argument("--memory", help="a folder of the host's memory, for checkpoints between the Trainer's")
    parser.add_argument("--memory-every", type=int, default=1, help="steps, those of logs and evaluations counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    while options.late and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(0.1)
        options.late = len(list(options.out.glob("weights-*.pt"))) < 2
    arguments = TrainingArguments(
        str(options.out / "checkpoints"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=1 if options.own_loss else 2,  # with 1 the last batch of an epoch is padded
        gradient_accumulation_steps=4 if options.own_loss else 2,
        include_num_input_tokens_seen=options.own_loss,
        max_grad_norm=0.1,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=3,
        save_steps=4,
        load_best_model_at_end=bool(options.patience),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    data = make_data(options.classified)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    counting = Counting()
    callbacks: list[TrainerCallback] = [Told(log, plan), counting]
    callbacks += [EarlyStoppingCallback(options.patience)] if options.patience else []
    trainer = Trainer(
        make_model(options.classified), arguments, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks
    )
    trainer.plan, trainer.log_of_job, trainer.counts = plan, log, defaultdict(int)
    trainer.wait_for, trainer.step_s, trainer.has_own_loss = options.wait_for, options.step_s, options.own_loss
    if options.memory:
        tiers = [MemoryTier(options.memory), DiskTier(options.out / "tiers", every=EverySteps(5))]
        trainer.elastic_checkpoint = TieredCheckpointManager(tiers, policy=EverySteps(options.memory_every))
    is_there = any((options.out / "checkpoints").glob("checkpoint-*"))
    try:
        result = trainer.train(resume_from_checkpoint=(options.resume and is_there) or None)
    except StoppedEarly as stop:
        log("stopped early", step=stop.step, others_go_on=stop.others_go_on)
        raise
    model: Any = trainer.model
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.save(flat, options.out / f"weights-{log.worker}-{trainer.args.process_index}.pt")
    trainer.save_model(str(options.out / "final"))
    log(
        "finished",
        step=trainer.state.global_step,
        best=trainer.state.best_metric,
        loss=result.training_loss,
        counted=counting.steps,
        tokens=trainer.state.num_input_tokens_seen,
        rank=trainer.args.process_index,
        publishes=trainer.args.should_save,
    )


if __name__ == "__main__":
    main()
