"""Manual optimization with an ElasticDDPStrategy alone, in one process: what Lightning does; and what is refused."""

from __future__ import annotations

import copy
import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.errors import UnfitError

pytest.importorskip("lightning", reason="the adapter for Lightning: pip install 'torchelastic[lightning]'")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.cluster.lightning_manual_models import MODELS, Accumulating, Gan, Manual
from torchelastic.adapters.lightning import ElasticDDPStrategy
from torchelastic.adapters.lightning.elastic_averages import averages_of

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


class MadeLate(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in pl_module.named_parameters()}


@pytest.mark.long
def test_an_average_that_is_made_in_training_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=r"callback MadeLate .* attribute shadow since the training began"):
        fitted(tmp_path, ElasticDDPStrategy(), Gan(), callbacks=[MadeLate()])


class Holding(Callback):
    """Has one value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Inner:
    def __init__(self, module: torch.nn.Module) -> None:
        self.of, self.shadow = module, [one.detach().clone() for one in module.parameters()]


class WithState:
    """As torch_ema's."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._shadow = [one.detach().clone() for one in module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": self._shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shadow = state["shadow"]


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (lambda module: copy.deepcopy(module), "value"),
        (lambda module: AveragedModel(module.generator), "value"),
        (lambda module: {name: one.detach().clone() for name, one in module.named_parameters()}, "value"),
        (WithState, "value"),
        (Inner, "value.shadow"),
        (lambda module: module, None),
        (lambda module: module.generator, None),
        (lambda module: list(module.parameters()), None),
        (lambda module: torch.optim.Adam(module.parameters()), None),
        (lambda _: torch.nn.Conv2d(1, 3, 5), None),
        (lambda _: {"noise": torch.zeros(64, 100)}, None),
        (lambda _: [], None),
    ],
)
def test_what_is_an_average_of_the_weights(made: Callable[[Gan], Any], path: str | None) -> None:
    module = Gan()
    found = averages_of([Holding(3), Holding(made(module))], module)
    assert [(place.number, place.path) for place in found] == ([] if path is None else [(1, path)])
    for average in found.values():
        state = copy.deepcopy(average.state_dict())
        tensors = [one for one in tree_flatten(average.state_dict())[0] if isinstance(one, torch.Tensor)]
        for one in tensors:
            one.data.add_(1)
        average.load_state_dict(state)
        for one, other in zip(tree_flatten(average.state_dict())[0], tree_flatten(state)[0], strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
