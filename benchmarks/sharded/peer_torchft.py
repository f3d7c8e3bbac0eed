"""One rank of a torchft replica that is itself sharded by FSDP2 (its HSDP). Run by `benchmarks.sharded.peers`.

A replica is a group of processes which hold one whole model together, sharded among them by torch's own gloo group; the
gradients of each shard are averaged over the replicas by torchft's manager. Its optimizer steps if all of it succeeded.
"""

from __future__ import annotations

import importlib
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.job.events import EventLog
from benchmarks.sharded import gpt

torchft: Any = importlib.import_module("torchft")  # is in the interpreter for peers, and not in ours


def main(folder: Path, size: str, step_ms: float, name: str, rank: int, world: int, port: int) -> None:
    note = EventLog(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model, inner = gpt.build(size, init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    gpt.initialize(model)
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    inner.step()  # the optimizer's state is there from now on, and can be received
    # not asked for again: a replica that is behind asks in the middle of a step, when FSDP has the layers put together
    shards = dict(enumerate(_local_tensors({"model": model.state_dict(), "optimizer": inner.state_dict()})))

    def load(saved: dict[int, torch.Tensor]) -> None:
        with torch.no_grad():
            for number, shard in shards.items():
                shard.copy_(saved[number])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: shards,
        replica_id=name,
        timeout=timedelta(seconds=30),
        rank=rank,
        world_size=world,
        store_addr="127.0.0.1",
        store_port=port,  # of the store of the group above
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, inner)
    tokens = gpt.make_data(gpt.SAMPLES_PER_WORKER, seed=rank)
    while True:
        before = manager.current_step()
        time.sleep(step_ms / 1000)
        optimizer.zero_grad()
        gpt.loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        works = [manager.allreduce(parameter.grad.to_local()) for parameter in parameters]
        for work in works:
            work.wait()
        optimizer.step()
        if manager.current_step() != before:
            note("committed", step=manager.current_step(), rank=rank, world=manager.num_participants())


def _local_tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree in its order, of DTensors this rank's shards."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _local_tensors(value)]
    if not isinstance(tree, torch.Tensor):
        return []
    return [tree.to_local() if hasattr(tree, "to_local") else tree]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:8]))
