"""Data for elastic training: each sample of an epoch exactly once, whatever happens to the world.

The names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.data.batch_sampler import BatchShare as BatchShare
    from torchelastic.data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from torchelastic.data.batch_sampler import Share as Share
    from torchelastic.data.cycling import CyclingIterator as CyclingIterator
    from torchelastic.data.distributed_sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from torchelastic.data.loader import ElasticLoader as ElasticLoader

_HOMES = {
    "BatchShare": "batch_sampler",
    "CyclingIterator": "cycling",
    "ElasticBatchSampler": "batch_sampler",
    "ElasticDistributedSampler": "distributed_sampler",
    "ElasticLoader": "loader",
    "Share": "batch_sampler",
}

__all__ = [
    "BatchShare",
    "CyclingIterator",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticLoader",
    "Share",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
