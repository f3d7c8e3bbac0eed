"""A worker under torchrun: FSDP2 and DCP, as torch documents them. Run by `benchmarks.sharded.peers`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.job.events import EventLog
from benchmarks.sharded import gpt

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly


def main(folder: Path, size: str, step_ms: float, every: int, checkpoints: Path) -> None:
    note = EventLog(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = gpt.build(size, init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    gpt.initialize(model)
    tokens = gpt.make_data(gpt.SAMPLES_PER_WORKER, seed=rank)
    step = _load(checkpoints, model, optimizer)
    while True:
        time.sleep(step_ms / 1000)
        gpt.loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("committed", step=step, rank=rank, world=world)
        if step % every == 0:
            _save(checkpoints, step, model, optimizer, is_first=rank == 0)


def _tree(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def _load(checkpoints: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that is complete, if there is one; returns its step."""
    complete = [int(path.parent.name) for path in checkpoints.glob("*/.metadata")]
    if not complete:
        return 0
    tree = _tree(model, optimizer)
    dcp.load(tree, storage_reader=dcp.FileSystemReader(checkpoints / str(max(complete))))
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    return max(complete)


def _save(
    checkpoints: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, is_first: bool
) -> None:
    # tmpfs has no use for fsync
    dcp.save(_tree(model, optimizer), storage_writer=dcp.FileSystemWriter(checkpoints / str(step), sync_files=False))
    if is_first:
        for path in checkpoints.iterdir():
            if int(path.name) < step:
                shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
