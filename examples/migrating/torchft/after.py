"""Fits a curve; there is no lighthouse to start, and no number of a replica group.

Start it with `torchelastic run --standalone --nproc-per-node 2 after.py --weights weights.pt`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import torchelastic

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
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dataset = make_dataset()
    sampler = torchelastic.ElasticBatchSampler(dataset, GLOBAL_BATCH_SIZE, epochs=args.epochs, shuffle=False)
    loader = torchelastic.ElasticLoader(dataset, sampler)
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = torchelastic.ModelState(model, sgd, sampler=sampler)
    coordinator = torchelastic.CoordinatorP2P("gloo", process_group_timeout=30_000)

    for step in torchelastic.steps(coordinator, state):
        with step:
            inputs, targets = next(loader)  # after the last epoch it ends the run, for everybody
            sgd.zero_grad()
            loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            sgd.step()
        if step.committed and sampler.cursor == 0 and coordinator.rank == 0:
            print(f"epoch {sampler.epoch}", flush=True)

    if coordinator.rank == 0:
        torch.save(model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
