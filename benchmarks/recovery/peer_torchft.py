"""A replica of torchft: its Manager, DDP and optimizer on gloo, one process. Run by `benchmarks.recovery.peers`."""

from __future__ import annotations

import importlib
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.job import models
from benchmarks.job.events import EventLog

torchft: Any = importlib.import_module("torchft")  # is in the interpreter for peers, and not in ours


def main(folder: Path, size: str, step_ms: float, name: str) -> None:
    note = EventLog(folder)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    module = models.make_model(size, seed=0)
    inner = models.make_optimizer(module)

    def state() -> dict[str, Any]:
        return {"module": module.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        module.load_state_dict(saved["module"])
        inner.load_state_dict(saved["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=name,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = torchft.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, inner)
    inputs, targets = models.make_data(size, models.SIZES[size].samples_per_worker)
    while True:
        before = manager.current_step()
        time.sleep(step_ms / 1000)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        if manager.current_step() != before:
            note("committed", step=manager.current_step(), rank=name, world=manager.num_participants())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4])
