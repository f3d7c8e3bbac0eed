"""Fits a curve under torchrun, which starts all workers again when one dies: each start goes on from the last file.

Start it with `torchrun --standalone --nproc-per-node 2 before.py --checkpoint curve.pt --weights weights.pt`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
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


@record
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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dataset = make_dataset()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.9)
    wrapped = DistributedDataParallel(model)

    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]

    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for inputs, targets in itertools.islice(loader, done, None):
            loss = torch.nn.functional.mse_loss(wrapped(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            scheduler.step()
            step += 1
            if step % args.save_every == 0 and dist.get_rank() == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved |= {"scheduler": scheduler.state_dict(), "step": step}
                half = args.checkpoint.with_suffix(".half")
                torch.save(saved, half)
                half.replace(args.checkpoint)

    if dist.get_rank() == 0:
        torch.save(model.state_dict(), args.weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
