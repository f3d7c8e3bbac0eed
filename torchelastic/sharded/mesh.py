"""How the ranks of a group become a device mesh, and what each rank's share of the data is then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchelastic.errors import NonRetryableException
from torchelastic.model.transfer import message_device
from torchelastic.torch_internals.sharding import forget_meshes

#: Given the world size: the mesh of all ranks. Called on every rank of every new group, inside the group.
MeshRule = Callable[[int], DeviceMesh]

#: Dimensions whose ranks compute the same samples, by the names that torch's documents give them.
NOT_DATA = frozenset({"tp", "tensor", "cp", "context", "pp", "pipeline", "ep", "expert"})


@dataclass(frozen=True)
class FullShard:
    """One dimension, "shard", with all ranks: each holds 1/N of the state. Any world size will do.

    Args:
        device_type: "cpu" or "cuda"; default: as the group's backend wants it, "cuda" for NCCL.
    """

    device_type: str | None = None

    def __call__(self, world_size: int) -> DeviceMesh:
        """See `MeshRule`."""
        return init_device_mesh(self.device_type or message_device().type, (world_size,), mesh_dim_names=("shard",))


@dataclass(frozen=True)
class HybridShard:
    """Two dimensions, "replicate" and "shard" (HSDP): each group of `shard` neighbouring ranks holds the whole state.

    Ranks of one host are neighbours, so with the number of workers of a host the shards stay inside hosts, and every
    host has all of the state: the loss of any but the last host costs no step. Start the run with
    `torchelastic run --multiple-of` and the same number: groups of other sizes are not formed then.

    Args:
        shard: ranks that hold one copy of the state together.
        device_type: as for `FullShard`.
    """

    shard: int
    device_type: str | None = None

    def __post_init__(self) -> None:
        if self.shard < 1:
            raise ValueError(f"shard={self.shard} must be at least 1")

    def __call__(self, world_size: int) -> DeviceMesh:
        """See `MeshRule`. Raises NonRetryableException for a world size that is no multiple."""
        if world_size % self.shard:
            raise NonRetryableException(
                f"{world_size} workers are no multiple of HybridShard(shard={self.shard}): start the run with "
                f"`torchelastic run --multiple-of {self.shard}`, so that groups of usable sizes are formed only"
            )
        shape = (world_size // self.shard, self.shard)
        return init_device_mesh(self.device_type or message_device().type, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class DataPosition:
    """Which share of each global batch a rank trains.

    Attributes:
        rank: among the ranks with different samples.
        size: how many those are.
    """

    rank: int
    size: int


def data_place(mesh: DeviceMesh, data_dims: Collection[str] | None = None) -> DataPosition:
    """This rank's share of the data.

    Args:
        mesh: with names of its dimensions; without, all of it counts.
        data_dims: the dimensions whose ranks have different samples. Default: all but those in `NOT_DATA`.

    Raises:
        ValueError: the mesh has no dimension of that name.
    """
    names = mesh.mesh_dim_names or tuple(str(number) for number in range(mesh.ndim))
    unknown = [name for name in data_dims or () if name not in names]
    if unknown:
        raise ValueError(f"data_dims names {', '.join(unknown)}, and the mesh has only {', '.join(names)}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in the mesh: a mesh has to hold every rank of the group")
    rank, size = 0, 1
    for name, place, extent in zip(names, coordinate, mesh.shape, strict=True):
        if name in data_dims if data_dims is not None else name not in NOT_DATA:
            rank, size = rank * extent + place, size * extent
    return DataPosition(rank, size)


def forget_earlier_meshes() -> None:
    """Have torch look at the mesh of a new group with new eyes; called before it is made, on the training thread.

    torch remembers how operations of DTensors are done by their meshes, and takes two meshes of the same ranks for one.
    But a process may have another rank in a new group of the same size: then a result would be given the part that
    belonged to its old rank (seen with torch 2.13: 3 workers, then 2, then 3). Each thread remembers for itself, also
    torch's own, on which the backward passes of a GPU run.
    """
    forget_meshes()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        with torch.enable_grad():
            _ClearedBackwards.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()  # type: ignore[no-untyped-call]


class _ClearedBackwards(torch.autograd.Function):
    """Clears the caches of the thread on which its backward pass runs."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        forget_meshes()
        return gradient
