"""What an ElasticDDPStrategy refuses before it trains, and what it does alone, in one process: what Lightning does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from torchelastic.errors import UnfitError

pytest.importorskip("lightning", reason="the adapter for Lightning: pip install 'torchelastic[lightning]'")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

import torchelastic.adapters.lightning.elastic_requirements as requirements
from torchelastic.adapters.lightning import ElasticDDPStrategy, classes_for
from torchelastic.adapters.lightning.elastic_evaluation import EvenBatches
from torchelastic.adapters.lightning.elastic_packing import packed, unpacked

DATA = TensorDataset(
    torch.randn(22, 4, generator=torch.Generator().manual_seed(3)),
    torch.randn(22, 1, generator=torch.Generator().manual_seed(4)),
)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "inputs": inputs}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step"}}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **{"batch_size": 4, **options})


def trainer_of(folder: Path, strategy: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    kept: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder, **quiet}
    return Trainer(strategy=strategy, **(kept | {"logger": CSVLogger(folder)} | options))


def fitted(folder: Path, strategy: Any, model: Any = None, data: Any = None, **options: Any) -> Any:
    trainer = trainer_of(folder, strategy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model or Model(), loader() if data is None else data, loader())
    return trainer


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},  # the last two batches of an epoch are a step, too
        {"val_check_interval": 2, "max_steps": 9, "max_epochs": -1},
        {"limit_train_batches": 3, "check_val_every_n_epoch": 2, "max_epochs": 3},
        {"precision": "bf16-mixed"},
    ],
)
def test_alone_it_trains_and_logs_as_lightning_does(tmp_path: Path, options: dict[str, Any]) -> None:
    ends = []
    for name, strategy in (("elastic", ElasticDDPStrategy()), ("plain", "auto")):
        callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(tmp_path / name / "best", monitor="val_loss")]
        trainer = fitted(tmp_path / name, strategy, callbacks=callbacks, **options)
        rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text()
        weights = torch.cat([one.detach().reshape(-1) for one in trainer.lightning_module.parameters()])
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        best = Path(trainer.checkpoint_callback.best_model_path).name
        ends.append((weights, [trainer.global_step, trainer.current_epoch, rate, best], rows))
    torch.testing.assert_close(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    [ours, theirs] = [[line.split(",")[:3] for line in rows.splitlines()] for *_, rows in ends]
    assert ours == theirs


@pytest.mark.long
def test_it_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """From Lightning's own checkpoint, with each batch once."""
    every = ModelCheckpoint(tmp_path / "all", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fitted(tmp_path, ElasticDDPStrategy(), data=loader(shuffle=True), callbacks=[every])
    again = trainer_of(tmp_path, ElasticDDPStrategy(), enable_checkpointing=False)
    again.fit(Model(), loader(shuffle=True), loader(), ckpt_path=tmp_path / "all" / "step=8.ckpt")
    assert again.global_step == whole.global_step == 12
    for one, other in zip(again.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_other_package_has_it_too() -> None:
    library = pytest.importorskip("pytorch_lightning")
    strategy = classes_for("pytorch_lightning")["ElasticDDPStrategy"]()
    assert isinstance(strategy, library.strategies.DDPStrategy)
    trainer = library.Trainer(accelerator="cpu", devices=1, max_steps=2, strategy=strategy, logger=False)
    assert isinstance(trainer.strategy, type(strategy))


@pytest.mark.parametrize(("samples", "batch_size"), [(9, 4), (10, 4), (7, 1), (2, 3), (24, 4)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_validation_sees_each_sample_once(samples: int, batch_size: int, world_size: int) -> None:
    ranks = [list(EvenBatches(samples, batch_size, rank, world_size)) for rank in range(world_size)]
    assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(samples))
    assert all(0 < len(batch) <= batch_size for batches in ranks for batch in batches)
    most = max(map(len, ranks))
    for batches in ranks:
        own = sum(map(len, batches))
        assert len(batches) == min(most, own), "as many batches on each rank, where it has so many samples"


def test_what_is_copied_before_each_step_comes_back_as_it_was() -> None:
    values = {
        "a": [1, 2.5, None, True, "text"],
        "numbers": {"half": torch.tensor(0.1, dtype=torch.float16), "count": torch.tensor([7])},
        "rows": torch.arange(6.0).reshape(2, 3),
        "infinite": float("inf"),
    }
    found = packed({**values, "left out": object()})
    assert torch.is_tensor(found["numbers"])
    back = unpacked(found)
    assert back.keys() == values.keys()
    assert back["a"] == values["a"]
    assert back["infinite"] == values["infinite"]
    for one, other in ((back["numbers"], values["numbers"]), ({"rows": back["rows"]}, {"rows": values["rows"]})):
        for name, tensor in other.items():  # type: ignore[attr-defined]
            assert one[name].dtype == tensor.dtype
            assert torch.equal(one[name], tensor), name


class OwnBackward(Model):
    def backward(self, loss: Any, *_: Any, **__: Any) -> None:
        loss.backward()


class Lbfgs(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Nothing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Iterated(Model):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Ends(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "data", "options", "named"),
    [
        (OwnBackward, loader, {}, "LightningModule.backward"),
        (Lbfgs, loader, {}, "LBFGS"),
        (Nothing, loader, {}, "training_step returned None"),
        (Iterated, loader, {}, "dataloader_iter"),
        (Ends, loader, {}, "on_train_batch_start returned -1"),
        (Model, lambda: DataLoader(Stream(), batch_size=4), {}, "IterableDataset"),
        (Model, lambda: loader(sampler=WeightedRandomSampler([1.0] * 22, 22)), {}, "WeightedRandomSampler"),
        (Model, lambda: [loader(), loader()], {}, "several training DataLoaders"),
        (Model, loader, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        (Model, loader, {"overfit_batches": 2}, "overfit_batches"),
        (Model, loader, {"sync_batchnorm": True}, "sync_batchnorm"),
        (Model, loader, {"max_time": "00:01:00:00"}, "max_time"),
        (Model, loader, {"val_check_interval": 2, "accumulate_grad_batches": 4}, "val_check_interval"),
        (Model, loader, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
    ],
)
def test_what_would_not_be_kept_is_refused_by_name(
    tmp_path: Path, model: Callable[[], Any], data: Callable[[], Any], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnfitError, match=named):
        fitted(tmp_path, ElasticDDPStrategy(), model(), data(), **options)


@pytest.mark.parametrize("option", ["ddp_comm_hook", "static_graph", "timeout", "model_averaging_period"])
def test_options_that_mean_nothing_are_refused(option: str) -> None:
    with pytest.raises(UnfitError, match=option):
        ElasticDDPStrategy(**{option: 1})  # type: ignore[arg-type]


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "KNOWN_RELEASES", "2.5")
    with pytest.raises(UnfitError, match=r"other loops than ElasticDDPStrategy knows \(those of 2\.5\)"):
        ElasticDDPStrategy()
