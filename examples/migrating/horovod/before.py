"""Fits a curve with Horovod Elastic. Not run by our tests: Horovod has no release that builds with a current torch.

Start it with `horovodrun -np 2 --min-np 1 --max-np 2 --host-discovery-script ./hosts.sh python before.py ...`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16  # of each worker
LEARNING_RATE = 0.025  # for each worker


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

    hvd.init()
    torch.set_num_threads(1)
    dataset = make_dataset()
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * hvd.size()

    state.register_reset_callbacks([scale_learning_rate])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, args.epochs):  # noqa: B020 - as in Horovod's examples
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}", flush=True)
            for state.batch, (inputs, targets) in enumerate(loader, state.batch):  # noqa: B020
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimizer.step()
                state.sampler.record_batch(state.batch, BATCH_SIZE)
                state.commit()
            state.sampler.set_epoch(state.epoch + 1)
            state.batch = 0

    train(state)

    if hvd.rank() == 0:
        torch.save(model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
