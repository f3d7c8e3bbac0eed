"""Data for elastic training: each sample of an epoch exactly once, whatever happens to the world.

The names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from torchelastic.data.cycling import CyclingIterator as CyclingIterator
    from torchelastic.data.distributed_sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from torchelastic.data.epoch_loader import EpochLoader as EpochLoader
    from torchelastic.data.epoch_stream import EpochStream as EpochStream
    from torchelastic.data.loader import ElasticLoader as ElasticLoader
    from torchelastic.data.shares import BatchShare as BatchShare
    from torchelastic.data.shares import Share as Share
    from torchelastic.data.stream import ElasticStream as ElasticStream
    from torchelastic.data.stream import StreamShare as StreamShare

_HOMES = {
    "BatchShare": "shares",
    "CyclingIterator": "cycling",
    "ElasticBatchSampler": "batch_sampler",
    "ElasticDistributedSampler": "distributed_sampler",
    "ElasticLoader": "loader",
    "ElasticStream": "stream",
    "EpochLoader": "epoch_loader",
    "EpochStream": "epoch_stream",
    "Share": "shares",
    "StreamShare": "stream",
}

__all__ = [
    "BatchShare",
    "CyclingIterator",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticLoader",
    "ElasticStream",
    "EpochLoader",
    "EpochStream",
    "Share",
    "StreamShare",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
