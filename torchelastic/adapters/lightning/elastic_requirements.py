"""What of a trainer of Lightning cannot recover in the running process, said before it trains."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from torchelastic.adapters.in_process.batches import EpochBatches
from torchelastic.errors import UnfitError

#: The releases whose loops are known: those of the contract tests.
KNOWN_RELEASES = "2.6"
_RESTART = (
    "train it with MemoryCheckpointCallback and strategy='ddp' (docs/lightning.md), which restarts all workers after a "
    "loss"
)
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
        "automatic_optimization=False": not module.automatic_optimization,
        "a LightningModule.backward of its own": type(module).backward is not base.backward,
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
    _raise_first(wrong)
    if dist.is_initialized() and not may_have_group:
        raise UnfitError(
            "a process group was formed before trainer.fit(), and newcomers would have to take part in that: call no "
            "collective before it"
        )


def require_trained_alike(trainer: Any) -> None:
    """The same, when optimizers have been made."""
    optimizers = trainer.strategy.optimizers
    wrong = {
        f"{len(optimizers)} optimizers in automatic optimization": len(optimizers) != 1,
        "LBFGS": any(isinstance(one, torch.optim.LBFGS) for one in optimizers),
    }
    _raise_first(wrong)


def _raise_first(wrong: Mapping[str, bool]) -> None:
    for what, is_given in wrong.items():
        if is_given:
            raise UnfitError(
                f"ElasticDDPStrategy cannot go on in the running process with {what}: leave it out, or {_RESTART}"
            )


def require_permutations(plain: Any) -> None:
    """Raise UnfitError for training data without a length, or drawn otherwise: that order would be lost."""
    if not isinstance(plain, DataLoader):
        raise UnfitError(
            f"the training data comes as a {type(plain).__name__}: give one DataLoader, of a dataset with a length"
        )
    if isinstance(plain.dataset, IterableDataset):
        raise UnfitError(
            "the training data is an IterableDataset, of which no worker can give another one its place: give a "
            "dataset with a length, or write a loop with torchelastic.ElasticStream (docs/data.md)"
        )
    batches: Any = plain.batch_sampler
    sampler = getattr(batches, "sampler", None)
    is_plain = type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == len(plain.dataset)  # type: ignore[arg-type]
    if type(batches) is not BatchSampler or not is_plain or getattr(sampler, "replacement", False):
        kind = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise UnfitError(
            f"the training data is drawn by a {kind}, whose order is not divided anew when the group changes: give the "
            "DataLoader batch_size and shuffle in its place"
        )


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
    _raise_first(wrong)
    assert isinstance(loaders[0], EpochBatches)
    return loaders[0]
