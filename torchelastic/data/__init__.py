"""Data for elastic training: each sample of an epoch exactly once, whatever happens to the world.

With an index, the order of an epoch is one permutation, fixed by (seed, epoch), and cut into global batches of
constant size; each rank takes a contiguous part of each batch. A stream is a fixed number of logical shards, of each
of which a batch takes the same number of samples; every rank knows the place of every shard. In both, another world
size changes who reads what, never the batches. Local batches differ in size by at most one (64 over 3 ranks: 22, 21,
21), so gradients are weighted by `sampler.weight`, local over global samples.

Random numbers that a dataset draws in a DataLoader's worker process depend on what that process did before, and do
not repeat after a rollback; those drawn in the training process do, if its random state is rolled back. The names are
loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from torchelastic.data.distributed_sampler import CyclingIterator as CyclingIterator
    from torchelastic.data.distributed_sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from torchelastic.data.epochs import EpochLoader as EpochLoader
    from torchelastic.data.epochs import EpochStream as EpochStream
    from torchelastic.data.loader import ElasticLoader as ElasticLoader
    from torchelastic.data.shares import BatchShare as BatchShare
    from torchelastic.data.shares import Share as Share
    from torchelastic.data.sources.api import Source as Source
    from torchelastic.data.sources.api import SourceError as SourceError
    from torchelastic.data.sources.changing import mapped as mapped
    from torchelastic.data.sources.changing import mixed as mixed
    from torchelastic.data.sources.changing import repeated as repeated
    from torchelastic.data.sources.packing import packed as packed
    from torchelastic.data.sources.parquet_files import parquet as parquet
    from torchelastic.data.sources.shuffling import shuffled as shuffled
    from torchelastic.data.sources.stateful import from_datasets as from_datasets
    from torchelastic.data.sources.stateful import from_stateful as from_stateful
    from torchelastic.data.sources.tar_files import tar_samples as tar_samples
    from torchelastic.data.sources.text_files import jsonl as jsonl
    from torchelastic.data.sources.text_files import lines as lines
    from torchelastic.data.stream import ElasticStream as ElasticStream
    from torchelastic.data.stream import StreamShare as StreamShare

__getattr__, __dir__ = lazily(__name__)
