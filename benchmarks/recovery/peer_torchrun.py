"""A worker under torchrun: plain DDP, and a checkpoint to start again from. Run by `benchmarks.recovery.peers`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.job import models
from benchmarks.job.events import EventLog

CHECKPOINT_EVERY = 20


def main(folder: Path, size: str, step_ms: float) -> None:
    note = EventLog(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    module = models.make_model(size, seed=0)
    model = DistributedDataParallel(module)
    optimizer = models.make_optimizer(module)
    inputs, targets = models.make_data(size, models.SIZES[size].samples_per_worker, seed=rank)
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        time.sleep(step_ms / 1000)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        step += 1
        note("committed", step=step, rank=rank, world=world)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            fresh = checkpoint.with_suffix(f".{os.getpid()}")
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, fresh)
            fresh.replace(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
