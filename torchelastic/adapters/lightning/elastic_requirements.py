"""What of a trainer of Lightning cannot recover in the running process, said before it trains."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchelastic.adapters.in_process.batches import EpochBatches
from torchelastic.adapters.in_process.requirements import require_known_order, require_no_group, require_none_of
from torchelastic.errors import UnfitError

#: The releases whose loops are known: those of the contract tests.
KNOWN_RELEASES = "2.6"
_RESTART = (
    "train it with MemoryCheckpointCallback and strategy='ddp' (docs/lightning.md), which restarts all workers after a "
    "loss"
)
_ADAPTER, _REMEDY = "ElasticDDPStrategy", f"leave it out, or {_RESTART}"
#: Options of DDPStrategy that mean nothing here, or would break a promise.
_NOT_TAKEN = {
    "cluster_environment", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period",
    "start_method", "static_graph", "timeout", "process_group_backend", "device_ids", "output_device", "process_group",
}  # fmt: skip


def require_known_version(library: str) -> None:
    """Raise UnfitError for a Lightning whose loops are others."""
    version = importlib.import_module(library.partition(".")[0]).__version__
    if ".".join(version.split(".")[:2]) != KNOWN_RELEASES:
        raise UnfitError(
            f"{library} {version} has other loops than ElasticDDPStrategy knows (those of {KNOWN_RELEASES}): install "
            f"'lightning>={KNOWN_RELEASES},<2.7', or {_RESTART}"
        )


def require_fit_options(options: Mapping[str, Any]) -> None:
    """Raise UnfitError for an option of DDPStrategy that would not be kept."""
    for name in sorted(_NOT_TAKEN & options.keys()):
        raise UnfitError(
            f"ElasticDDPStrategy does not take {name}: leave it out. Groups, time-outs and the exchange of gradients "
            "are torchelastic's (docs/lightning.md)"
        )


def require_supported(trainer: Any, *, may_have_group: bool) -> None:
    """Raise UnfitError for what would not be kept: names it, and says what to do. Before anything is set up."""
    module = trainer.lightning_module
    callbacks = {one.__name__ for callback in trainer.callbacks for one in type(callback).__mro__}
    library = "pytorch_lightning" if type(trainer).__module__.startswith("pytorch_lightning") else "lightning.pytorch"
    base = importlib.import_module(library).LightningModule
    wrong = {
        "a LightningModule.backward of its own": (
            module.automatic_optimization and type(module).backward is not base.backward
        ),
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "overfit_batches": bool(trainer.overfit_batches),
        "sync_batchnorm": trainer.strategy._layer_sync is not None,
        "StochasticWeightAveraging": "StochasticWeightAveraging" in callbacks,
        "BatchSizeFinder": "BatchSizeFinder" in callbacks,
        "LearningRateFinder": "LearningRateFinder" in callbacks,
        "GradientAccumulationScheduler": "GradientAccumulationScheduler" in callbacks,
        "max_time (the Timer callback)": "Timer" in callbacks,
        "a val_check_interval of time": trainer._val_check_time_interval is not None,
        "a checkpoint callback of torchelastic's other adapters": "BatchEndSaver" in callbacks,
        f"{type(trainer.precision_plugin).__name__}": type(trainer.precision_plugin).__name__
        not in ("Precision", "MixedPrecision", "DoublePrecision", "HalfPrecision"),
    }
    require_none_of(_ADAPTER, wrong, _REMEDY)
    if not may_have_group:
        require_no_group("trainer.fit()", "call no collective before it")


def require_trained_alike(trainer: Any) -> None:
    """The same, when optimizers have been made."""
    optimizers = trainer.strategy.optimizers
    wrong = {
        f"{len(optimizers)} optimizers in automatic optimization": (
            trainer.lightning_module.automatic_optimization and len(optimizers) != 1
        ),
        "LBFGS": any(isinstance(one, torch.optim.LBFGS) for one in optimizers),
    }
    require_none_of(_ADAPTER, wrong, _REMEDY)


def require_one_loader(plain: Any) -> None:
    """Raise UnfitError for training data that is no DataLoader, has no length, or is drawn in an order of its own."""
    if not isinstance(plain, DataLoader):
        raise UnfitError(
            f"the training data comes as a {type(plain).__name__}: give one DataLoader, of a dataset with a length"
        )
    require_known_order(plain)


def require_plain_loop(trainer: Any, combined_loader: Any, fetcher: Any) -> EpochBatches:
    """The batches of the training. Raises UnfitError: they come from several loaders, or otherwise."""
    loaders = combined_loader.flattened
    interval, accumulate = trainer.val_check_batch, trainer.accumulate_grad_batches
    at_each = trainer.check_val_every_n_epoch is None or interval < trainer.num_training_batches
    wrong = {
        "several training DataLoaders": len(loaders) != 1 or combined_loader.iterables is not loaders[0],
        "a training_step that takes dataloader_iter": "Iter" in type(fetcher).__name__,
        f"val_check_interval ({interval} batches) that accumulate_grad_batches={accumulate} does not divide": (
            trainer.enable_validation and at_each and bool(interval % accumulate)
        ),
    }
    require_none_of(_ADAPTER, wrong, _REMEDY)
    assert isinstance(loaders[0], EpochBatches)
    return loaders[0]
