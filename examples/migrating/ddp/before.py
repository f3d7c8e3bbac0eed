"""Fits a curve with plain DDP; rank 0 writes a file with torch.save after each epoch.

Start it with `torchrun --standalone --nproc-per-node 2 before.py --checkpoint curve.pt`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH_SIZE = 32


def make_dataset() -> TensorDataset:
    """The same on each rank."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))


def make_model() -> torch.nn.Module:
    """With the same weights on each rank."""
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = make_dataset()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = DistributedDataParallel(model)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
        if dist.get_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, args.checkpoint)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
