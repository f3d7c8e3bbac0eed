"""Which part of a tensor this rank holds, and the memory that it lies in."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchelastic.checkpoint.shards.boxes import Box
from torchelastic.checkpoint.shards.tensors import dtype_name
from torchelastic.sharded.regions import Part


def box_of(tensor: torch.Tensor) -> Box:
    """The box of the whole tensor that this rank holds; a plain tensor is whole on every rank."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in sizes:  # torch places what is empty behind the end
        return Box((0,) * len(sizes), tuple(sizes))
    return Box(tuple(offsets), tuple(sizes))


def part_of(tensor: torch.Tensor) -> Part:
    """How a tensor is described to other ranks."""
    return Part(dtype_name(tensor.dtype), tuple(tensor.shape), box_of(tensor), isinstance(tensor, DTensor))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds; shares its memory."""
    # not `to_local`, which takes ten times as long, in each copy, for each tensor
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
