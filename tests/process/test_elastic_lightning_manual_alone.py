"""Manual optimization with an ElasticDDPStrategy alone, in one process: what Lightning does; and what is refused."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.errors import UnfitError

pytest.importorskip("lightning", reason="the adapter for Lightning: pip install 'torchelastic[lightning]'")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.cluster.lightning_manual_models import MODELS, Accumulating, Gan, Manual
from torchelastic.adapters.lightning import ElasticDDPStrategy

DATA = TensorDataset(
    torch.randn(22, 4, generator=torch.Generator().manual_seed(3)),
    torch.randn(22, 1, generator=torch.Generator().manual_seed(4)),
)


def fitted(folder: Path, strategy: Any, model: Manual, **options: Any) -> Any:
    trainer = Trainer(
        **{
            "accelerator": "cpu", "devices": 1, "max_epochs": 3, "default_root_dir": folder, "log_every_n_steps": 1,
            "enable_progress_bar": False, "enable_model_summary": False, "logger": CSVLogger(folder),
            "num_sanity_val_steps": 0, "strategy": strategy, **options,
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(DATA, batch_size=4), DataLoader(DATA, batch_size=4))
    return trainer


def logged(file: Path) -> list[dict[str, float]]:
    """Each line, with the values that it has."""
    rows = csv.DictReader(file.read_text().splitlines())
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "max_steps": 5, "max_epochs": -1}])
def test_alone_it_trains_and_logs_as_lightning_does(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    ends = []
    for kind, strategy in (("elastic", ElasticDDPStrategy()), ("plain", "auto")):
        saves = ModelCheckpoint(tmp_path / kind / "best", monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
        trainer = fitted(tmp_path / kind, strategy, MODELS[name](), callbacks=[saves], **options)
        rows = logged(Path(trainer.logger.log_dir) / "metrics.csv")
        weights = torch.cat([one.detach().reshape(-1) for one in trainer.lightning_module.parameters()])
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        files = sorted(path.name for path in (tmp_path / kind / "best").glob("*"))
        ends.append((weights, [trainer.global_step, trainer.current_epoch, rates, files], rows))
    torch.testing.assert_close(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert [sorted(row) for row in ends[0][2]] == [sorted(row) for row in ends[1][2]]
    for ours, theirs in zip(ends[0][2], ends[1][2], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


class PlainBackward(Gan):
    """In the second of two passes only."""

    passes = 0

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.passes += 1
        if self.passes % 2:
            super().manual_backward(loss, *args, **kwargs)
        else:
            torch.autograd.backward(loss)


class Local(Accumulating):
    """Gradients stay on this worker, but for the last of three batches, which averages all."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=(batch_idx + 1) % self.every == 0):
            return super().training_step(batch, batch_idx)


class StepsWithLocal(Local):
    every = 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        with strategy.block_backward_sync():
            return Accumulating.training_step(self, batch, batch_idx)


class StepsFirst(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        optimizer.step()
        return super().training_step(batch, batch_idx)


class AtBatchEnd(Accumulating):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.layers(batch[0]).mean())


class StepsAtBatchEnd(Accumulating):
    every = 100

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()


class Lbfgs(Accumulating):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (PlainBackward, r"self\.manual_backward\(loss\) in place of loss\.backward\(\)"),
        (Local, "training_step ends after a manual_backward under sync_grad=False"),
        (StepsWithLocal, "an optimizer steps after a manual_backward under sync_grad=False"),
        (StepsFirst, "an optimizer steps .* before the first manual_backward of its batch"),
        (AtBatchEnd, "manual_backward is called outside of training_step"),
        (StepsAtBatchEnd, "an optimizer steps outside of training_step"),
        (Lbfgs, "LBFGS"),
    ],
)
def test_what_would_not_be_kept_is_refused_by_name(tmp_path: Path, model: Callable[[], Manual], named: str) -> None:
    with pytest.raises(UnfitError, match=named):
        fitted(tmp_path, ElasticDDPStrategy(), model())
