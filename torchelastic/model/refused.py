"""Modules that `ModelState` cannot keep."""

from __future__ import annotations

import torch


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raise ValueError for a module that is wrapped already, or of which this worker has only a part."""
    names = {type(module).__name__ for module in model.modules()}
    if "DistributedDataParallel" in names or "DataParallel" in names:
        raise ValueError("give ModelState the plain module: it wraps it anew for each group")
    sharded = "FullyShardedDataParallel" in names or any(hasattr(p, "device_mesh") for p in model.parameters())
    if sharded:
        raise ValueError(
            "ModelState keeps one whole model per worker, and this module is sharded (FSDP, DTensor): use "
            "torchelastic.ShardedState, which makes it anew for each group (docs/sharded.md)"
        )
