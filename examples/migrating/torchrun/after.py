"""Fits a curve; when a worker dies the others go on. Checkpoints are for the day when all die.

Start it with `torchelastic run --standalone --nproc-per-node 2 after.py --checkpoint curve --weights weights.pt`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import torchelastic
from torchelastic.checkpoint import EverySteps, FileSystemCheckpointManager, set_checkpoint_manager

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
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    coordinator = torchelastic.CoordinatorP2P("nccl" if device.type == "cuda" else "gloo")
    dataset = make_dataset()
    sampler = torchelastic.ElasticBatchSampler(dataset, GLOBAL_BATCH_SIZE, epochs=args.epochs, shuffle=False)
    loader = torchelastic.ElasticLoader(dataset, sampler)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.9)
    state = torchelastic.ModelState(model, optimizer, scheduler=scheduler, sampler=sampler)
    set_checkpoint_manager(FileSystemCheckpointManager(args.checkpoint, keep=2))

    def train_step(state: torchelastic.ModelState) -> None:
        inputs, targets = next(loader)  # after the last epoch it ends the run, for everybody
        loss = torch.nn.functional.mse_loss(state.model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        scheduler.step()

    torchelastic.train(coordinator, train_step, state, checkpoint=EverySteps(args.save_every))

    if coordinator.rank == 0:
        torch.save(model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
