"""Fits a curve with torchft; start a lighthouse first, then this once for each replica group of one process.

Start it with `REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://host:29510 python before.py ...`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

GLOBAL_BATCH_SIZE = 32


def make_dataset() -> TensorDataset:
    """The same in each replica group."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))


def make_model() -> torch.nn.Module:
    """With the same weights in each replica group."""
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    dataset = make_dataset()
    sampler = DistributedSampler(
        dataset, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=False
    )
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // groups, sampler=sampler)
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load_state_dict(received: dict[str, Any]) -> None:
        model.load_state_dict(received["model"])
        sgd.load_state_dict(received["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun's, where a group has several
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=groups,
        use_async_quorum=False,
        replica_id=f"curve_{group}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, sgd)

    while manager.current_step() < args.epochs * len(loader):
        epoch, done = divmod(manager.current_step(), len(loader))
        sampler.set_epoch(epoch)
        if group == 0:
            print(f"epoch {epoch}", flush=True)
        for inputs, targets in itertools.islice(loader, done, None):
            optimizer.zero_grad()  # asks for a quorum
            loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()  # if all have voted for it

    if group == 0:
        torch.save(model.state_dict(), args.weights)
    manager.shutdown()


if __name__ == "__main__":
    main()
