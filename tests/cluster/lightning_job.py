"""A script of Lightning as its users write them, with faults: see `test_elastic_lightning.py`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, Subset, TensorDataset

import torchelastic
from tests.cluster.elastic_job import EventLog
from torchelastic.adapters.lightning import ElasticDDPStrategy
from torchelastic.checkpoint import EverySteps, MemoryTier, TieredCheckpointManager
from torchelastic.lifetime import StoppedEarly
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.testing.faults import FaultPlan

SAMPLES = 46


class Model(LightningModule):
    """Trained in double precision, with all that `self.log` is used for."""

    def __init__(self, log: EventLog, plan: FaultPlan, wait_for: int, step_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.told, self.plan, self.wait_for, self.step_s = log, plan, wait_for, step_s

    def reach(self, phase: str) -> None:
        self.plan.reach(phase, self.trainer.global_step, self.trainer.global_rank)

    def as_trained(self, batch: Any) -> Any:
        dtype = next(self.parameters()).dtype
        return [one.to(dtype) if one.is_floating_point() else one for one in batch]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, numbers = self.as_trained(batch)
        if self.trainer.global_step >= 6 and self.trainer.world_size < self.wait_for:
            time.sleep(0.7)  # a run gives up after 100 failures
            raise torchelastic.RetryableException("waits for a newcomer")
        time.sleep(self.step_s)
        self.reach("forward")
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        round_ = this_worker().position().round
        self.told("trained", step=self.trainer.global_step, round=round_, samples=numbers.tolist())
        return loss

    def on_after_backward(self) -> None:
        self.reach("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        del optimizer
        self.reach("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = self.as_trained(batch)
        if not self.trainer.sanity_checking:
            self.reach("validate")
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        by_epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_epoch, "interval": "epoch", "monitor": "val_loss"},
        ]


class Data(LightningDataModule):
    """Prepared in a file once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / "data.pt"

    def prepare_data(self) -> None:
        if not self.file.exists():
            generator = torch.Generator().manual_seed(3)
            inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
            torch.save((inputs, inputs.sin().sum(1, keepdim=True)), self.file)

    def setup(self, stage: str) -> None:
        inputs, targets = torch.load(self.file, weights_only=True)
        self.data = TensorDataset(inputs, targets, torch.arange(SAMPLES))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(self.data, range(14)), batch_size=3)


class Told(Callback):
    """Writes down what callbacks are told."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.epochs = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.is_tensor(outputs["loss"])
        assert len(batch[0]) > 0
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        here = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx, "lr": rate}
        self._model.told("tried batch", **here, **metrics)
        self._model.reach("batch end")
        trainer.strategy.barrier()
        incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._model.told("batch", **here, incarnation=incarnation, **metrics)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1
        self._model.reach("epoch end")
        trainer.strategy.barrier()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._model.reach("epoch start")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._model.reach("save")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from half of the steps on")
    parser.add_argument("--patience", type=int, default=9)
    parser.add_argument("--min-delta", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="64-true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--late", action="store_true", help="who is started again waits until the others have ended")
    parser.add_argument("--memory", help="a folder of the host's memory, for checkpoints beside Lightning's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    while options.late and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(0.1)
        options.late = len(list(options.out.glob("weights-*.pt"))) < 2
    seed_everything(5)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    model = Model(log, plan, options.wait_for, options.step_s)
    if options.precision == "64-true":
        model.double()  # else Lightning loads a checkpoint into single precision
    told = Told(model)
    best = ModelCheckpoint(options.out / "best", monitor="val_loss", filename="{step}", save_last=True)
    early = EarlyStopping("val_loss", min_delta=options.min_delta, patience=options.patience)
    manager = None
    if options.memory:
        manager = TieredCheckpointManager([MemoryTier(options.memory)], policy=EverySteps(1))
    precision: dict[str, Any] = {"precision": options.precision}
    if options.precision == "16-mixed":  # a Trainer on a CPU would take another one, which scales no losses
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]}
    trainer = Trainer(
        accelerator="cpu",
        strategy=ElasticDDPStrategy(checkpoint=manager),
        max_epochs=options.epochs,
        **precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        log_every_n_steps=1,
        logger=CSVLogger(options.out / "logs"),
        callbacks=[early, best, LearningRateMonitor("step"), told],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.out / "best" / "last.ckpt"
    path = str(last) if options.resume and last.exists() else None
    try:
        trainer.fit(model, datamodule=Data(options.out), ckpt_path=path)
    except StoppedEarly as stop:
        log("stopped early", step=stop.step, others_go_on=stop.others_go_on)
        raise
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.save(flat, options.out / f"weights-{log.worker}-{trainer.global_rank}.pt")
    trainer.save_checkpoint(options.out / "final.ckpt")
    log(
        "finished",
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        best=float(best.best_model_score or 0.0),
        best_file=Path(best.best_model_path).name,
        waited=early.wait_count,
        epochs_told=told.epochs,
        rank=trainer.global_rank,
    )


if __name__ == "__main__":
    main()
