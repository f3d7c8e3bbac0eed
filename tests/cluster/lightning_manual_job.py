"""A script of Lightning with manual optimization, with faults: see `test_elastic_lightning_manual.py`."""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

import torchelastic
from tests.cluster.elastic_job import EventLog
from tests.cluster.lightning_job import Data
from tests.cluster.lightning_manual_models import MODELS
from torchelastic.adapters.lightning import ElasticDDPStrategy
from torchelastic.checkpoint import EverySteps, MemoryTier, TieredCheckpointManager
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.testing.faults import FaultPlan


class Told(Callback):
    """Writes down what callbacks are told, and has faults strike."""

    def __init__(self, log: EventLog, plan: FaultPlan, wait_for: int, step_s: float) -> None:
        self._log, self._plan, self._wait_for, self._step_s = log, plan, wait_for, step_s

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop

        def reach(phase: str) -> None:
            self._plan.reach(phase, loop.total_batch_idx, trainer.global_rank)

        def saw(samples: list[int]) -> None:
            if loop.total_batch_idx >= 8 and trainer.world_size < self._wait_for:
                time.sleep(0.7)  # a run gives up after 100 failures
                raise torchelastic.RetryableException("waits for a newcomer")
            time.sleep(self._step_s)
            counted = loop.manual_optimization.elastic.parts[0].samples  # 0: it has no part, and computes another's
            round_ = this_worker().position().round
            self._log("trained", step=loop.total_batch_idx, round=round_, samples=samples[:counted])

        pl_module.reach, pl_module.saw = reach, saw

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        here = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx, "lr": rate}
        pl_module.reach("batch end")
        trainer.strategy.barrier()
        incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._log("batch", **here, incarnation=incarnation, **metrics)


class Shadow(Callback):
    """An average by name, of tensors that each update makes anew; they are the weights in the end."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, one in pl_module.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(one.detach(), 0.1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for name, one in pl_module.named_parameters():
                one.copy_(self.shadow[name])


class Copied:
    """A copy of the module that follows it, in an object of a class of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.ema = copy.deepcopy(module).requires_grad_(False)

    def update(self, module: torch.nn.Module) -> None:
        for slow, fast in zip(self.ema.parameters(), module.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)


class ModelAverage(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = Copied(pl_module.generator)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update(pl_module.generator)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.generator.load_state_dict(self.average.ema.state_dict())


AVERAGES: dict[str, Callable[[], Callback]] = {
    "lightning": lambda: EMAWeightAveraging(decay=0.9),
    "shadow": Shadow,
    "module": ModelAverage,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="gan")
    parser.add_argument("--average", choices=AVERAGES)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from half of the steps on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--scaled", action="store_true", help="half precision, with a GradScaler")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--memory", help="a folder of the host's memory, for checkpoints beside Lightning's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(5)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    model = MODELS[options.model]()
    precision: dict[str, Any] = {"precision": "64-true"}
    if options.scaled:  # a Trainer on a CPU would take another one, which scales no losses
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]}
    else:
        model.double()  # else Lightning loads a checkpoint into single precision
    best = ModelCheckpoint(options.out / "best", monitor="val_loss", filename="{step}", save_last=True)
    averages = [AVERAGES[options.average]()] if options.average else []
    manager = None
    if options.memory:
        manager = TieredCheckpointManager([MemoryTier(options.memory)], policy=EverySteps(1))
    trainer = Trainer(
        accelerator="cpu",
        strategy=ElasticDDPStrategy(global_batch_size=5, checkpoint=manager),  # 3 samples and 2, and at last 1 and 0
        max_epochs=options.epochs,
        **precision,
        log_every_n_steps=1,
        logger=CSVLogger(options.out / "logs"),
        callbacks=[best, *averages, Told(log, plan, options.wait_for, options.step_s)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.out / "best" / "last.ckpt"
    path = str(last) if options.resume and last.exists() else None
    trainer.fit(model, datamodule=Data(options.out), ckpt_path=path)
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.save(flat, options.out / f"weights-{log.worker}-{trainer.global_rank}.pt")
    log(
        "finished",
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        best=float(best.best_model_score or 0.0),
        best_file=Path(best.best_model_path).name,
        waited=0,
        rank=trainer.global_rank,
    )


if __name__ == "__main__":
    main()
