"""What an `ElasticAccelerator` refuses, by name, before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from torchelastic.adapters.in_process.requirements import require_known_order, require_no_group, require_none_of
from torchelastic.errors import UnfitError
from torchelastic.observe.ledger.meter import this_worker

_ADAPTER = "ElasticAccelerator"
_RESTART = "save it with MemoryCheckpointer (docs/transformers.md), where a loss restarts all workers"
#: Of the accelerator, and of the environment that `accelerate config` makes: what has no whole model on each worker.
_SHARDED = {
    "fsdp_plugin": "FSDP",
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "a parallelism_config",
}
_SHARDED_BY_ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def require_fit_options(options: Mapping[str, Any]) -> None:
    """Raise UnfitError for an option of an `Accelerator` that would not be kept.

    Args:
        options: as it is called with, by name.
    """
    sharded = [what for name, what in _SHARDED.items() if options.get(name) is not None]
    sharded += [
        what
        for name, what in _SHARDED_BY_ENVIRONMENT.items()
        if os.environ.get(name, "false").lower() in ("1", "true", "yes")
    ]
    require_none_of(
        _ADAPTER,
        {f"{what}, where no worker has the whole model": True for what in sharded},
        "use an Accelerator without it, write a loop with torchelastic.ShardedState (docs/sharded.md), or " + _RESTART,
    )
    wrong = {
        "dispatch_batches=True": (
            bool(getattr(options.get("dataloader_config"), "dispatch_batches", None)),
            "leave it out: each worker reads its own share",
        ),
        "dynamo_backend": (
            options.get("dynamo_backend") is not None or options.get("dynamo_plugin") is not None,
            "leave it out, and call model.compile() yourself before prepare()",
        ),
        "mixed_precision='fp8'": (str(options.get("mixed_precision")) == "fp8", f"use bf16, or {_RESTART}"),
        "step_scheduler_with_optimizer=False": (
            options.get("step_scheduler_with_optimizer") is False,
            "leave it out: a prepared scheduler steps once in a step; one by epochs is stepped where "
            "step.number % len(loader) is 0",
        ),
        "a communication hook of DDP": (
            any(
                str(getattr(getattr(one, "comm_hook", None), "value", "no")) != "no"
                for one in options.get("kwargs_handlers") or ()
            ),
            "leave it out",
        ),
    }
    for what, (is_given, remedy) in wrong.items():
        require_none_of(_ADAPTER, {what: is_given}, remedy)


def require_own_group() -> None:
    """Raise UnfitError: a process group exists already, and it is not that of an earlier run in this process."""
    if this_worker().position().round < 0:
        require_no_group(
            "the ElasticAccelerator was made",
            "import torchelastic.adapters.elastic_accelerator at the top of the script, before an Accelerator is made, "
            "make one ElasticAccelerator, and call no collective before its steps()",
        )


def require_training_data(loader: Any) -> DataLoader[Any]:
    """The user's DataLoader for training. Raises UnfitError: no other worker could go on where this one is in it."""
    if not isinstance(loader, DataLoader):
        raise UnfitError(
            f"loader() takes a torch DataLoader that was not prepared, and got a {type(loader).__name__}: leave the "
            "training data out of prepare()"
        )
    if getattr(loader, "_is_accelerate_prepared", False):
        raise UnfitError("loader() takes a DataLoader that was not prepared: leave the training data out of prepare()")
    require_known_order(loader)
    return loader
