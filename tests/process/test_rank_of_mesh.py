"""A process that has another rank in the next mesh of the same ranks: operations of DTensors go by the new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchelastic.sharded.mesh import forget_earlier_meshes

ROWS = 5  # of two times two ranks: 2, 1, 1 and 1


def gathered(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """As this rank of four: the rows of the sum of two tensors here, and what each all-gather takes the whole to be."""
    found: list[int] = []
    unsharded = Shard._to_replicate_tensor

    def watched(self: Any, local: torch.Tensor, mesh: Any, dim: int, shape: Any, *more: Any) -> torch.Tensor:
        found.append(int(shape[0]))
        return unsharded(self, local, mesh, dim, shape, *more)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        forget_earlier_meshes()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        part = torch.ones(2 if rank == 0 else 1, 3)
        tensor = DTensor.from_local(
            part, mesh, (Shard(0), Shard(0)), run_check=False, shape=torch.Size((ROWS, 3)), stride=(3, 1)
        )
        total = tensor + tensor
        assert isinstance(total, DTensor)
        rows = list(total.to_local().shape[:1])
        with monkeypatch.context() as patch:
            patch.setattr(Shard, "_to_replicate_tensor", watched)
            tensor.redistribute(placements=(Replicate(), Replicate()))
        return rows, found
    finally:
        dist.destroy_process_group()


def test_the_way_to_the_whole_tensor_is_that_of_the_new_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathered(0, monkeypatch) == ([2], [3, ROWS]), "of the first half of the ranks, then of all"
    assert gathered(2, monkeypatch) == ([1], [2, ROWS])
