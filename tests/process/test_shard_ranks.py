"""DTensors of two real ranks: saved by two, read by two, by one, and the other way round."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.process.pairs import survivor_of
from torchelastic.checkpoint.shards import ShardReader, load_tree, read_into, read_tree, save_tree


def whole() -> dict[str, torch.Tensor]:
    return {"rows": torch.arange(15.0).view(5, 3), "columns": torch.arange(8.0).view(2, 4), "one": torch.ones(1, 2)}


def distributed(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "rows": distribute_tensor(values["rows"], mesh, [Shard(0)]),  # three rows and two
        "columns": distribute_tensor(values["columns"], mesh, [Shard(1)]),
        "one": distribute_tensor(values["one"], mesh, [Shard(0)]),  # rank 1 has nothing of it
        "same": distribute_tensor(values["rows"], mesh, [Replicate()]),
    }


def member(folder: Path) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    save_tree(folder / f"shard-{rank}", distributed(whole()))
    if rank == 0:
        save_tree(folder / "single", {**whole(), "same": whole()["rows"]})
    dist.barrier()
    found: dict[str, torch.Tensor] = {}
    for source, names in (("pair", ["shard-0", "shard-1"]), ("single", ["single"])):
        template = distributed({name: torch.full_like(tensor, 77) for name, tensor in whole().items()})
        shards = [ShardReader(folder / name) for name in names]
        read_into(shards, template)
        for shard in shards:
            shard.close()
        for name, tensor in template.items():
            assert isinstance(tensor, DTensor)
            found[f"{source}/{name}"] = tensor.full_tensor()
    return found


def victim(folder: Path) -> None:
    member(folder)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def survivor(folder: Path) -> dict[str, torch.Tensor]:
    found = member(folder)
    dist.barrier()
    return found


@pytest.mark.long
def test_dtensors_of_two_ranks(tmp_path: Path) -> None:
    found = survivor_of(tmp_path, survivor, victim)
    expected = {**whole(), "same": whole()["rows"]}
    assert found.keys() == {f"{source}/{name}" for source in ("pair", "single") for name in expected}
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key.split("/")[1]]), key
    with ShardReader(tmp_path / "shard-0") as first, ShardReader(tmp_path / "shard-1") as second:
        assert {entry.name for entry in first.header.entries if entry.is_shard} == {"rows", "columns", "one"}
        for shards in ([first, second], [second, first]):
            read = read_tree(shards)
            assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert torch.equal(load_tree(tmp_path / "single")["rows"], expected["rows"])
