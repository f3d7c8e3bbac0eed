"""Which part of a tensor this rank holds, and the memory that it lies in."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.shards.header import Entry
from torchelastic.checkpoint.shards.tensors import dtype_name, region_of


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """How a tensor is described to other ranks."""
    is_shard = isinstance(tensor, DTensor)
    return Entry.of(name, dtype_name(tensor.dtype), tuple(tensor.shape), region_of(tensor), is_shard=is_shard)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds; shares its memory."""
    # not `to_local`, which takes ten times as long, in each copy, for each tensor
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
