"""Fits a line, written for torchelastic 0.1; start it on each host, once for each worker.

Start it with `python after.py --init-method 'etcd://localhost:2379/job1?min_workers=1&max_workers=2' ...`.
"""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchelastic
import torchelastic.distributed as edl_dist
from torchelastic import metrics
from torchelastic.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
from torchelastic.data import CyclingIterator, ElasticDistributedSampler
from torchelastic.p2p import CoordinatorP2P

BATCH_SIZE = 16  # of each worker


def make_dataset() -> TensorDataset:
    """The same on each rank; the weights that fit it are 1, 2, .. 8."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs @ torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(1))


class LineState(torchelastic.State):
    """Model, optimizer, and how much of the data was seen."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.dataset = make_dataset()
        self.model = torch.nn.Linear(8, 1, bias=False).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.steps = self.epoch = self.start_index = 0

    def sync(self, world_size: int, rank: int) -> LineState:
        """Take the state of the most tenured worker; load data from its position on."""
        tenured, _ = edl_dist.all_gather_return_max_long(self.steps)
        data = None
        if rank == tenured:
            buffer = io.BytesIO()
            torch.save(self.capture_snapshot(), buffer)
            data = np.frombuffer(buffer.getvalue(), dtype=np.uint8)
        received = edl_dist.broadcast_binary(data, tenured)
        if received is not None and rank != tenured:
            self.apply_snapshot(torch.load(io.BytesIO(received.tobytes())))
        self.world_size = world_size
        self.wrapped = DistributedDataParallel(self.model)
        self.batches = CyclingIterator(self.epochs, self.read_epoch, start_epoch=self.epoch)
        return self

    def read_epoch(self, epoch: int) -> Iterator[Any]:
        """What is left of an epoch, as this worker sees it."""
        start_index = self.start_index if epoch == self.epoch else 0
        sampler = ElasticDistributedSampler(self.dataset, start_index=start_index)
        sampler.set_epoch(epoch)
        return iter(DataLoader(self.dataset, batch_size=BATCH_SIZE, sampler=sampler))

    def capture_snapshot(self) -> Any:
        """All that changes."""
        counters = (self.steps, self.epoch, self.start_index)
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), counters))

    def apply_snapshot(self, snapshot: Any) -> None:
        """Set all that changes."""
        model, optimizer, (self.steps, self.epoch, self.start_index) = snapshot
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - part of the contract
        """Every 50 steps."""
        return self.steps % 50 == 0


def train_step(state: LineState) -> tuple[LineState, torchelastic.WorkerStats]:
    """One batch of each worker."""
    inputs, targets = next(state.batches)  # after the last epoch it ends the run
    loss = torch.nn.functional.mse_loss(state.wrapped(inputs), targets)
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    state.optimizer.step()
    metrics.getStream("line").add_value("loss", loss.item())
    state.steps += 1
    state.start_index += BATCH_SIZE * state.world_size
    if state.start_index >= len(state.dataset):
        state.epoch, state.start_index = state.epoch + 1, 0
    return state, torchelastic.SimpleWorkerStats(progress_rate=1.0)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--init-method", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all hosts see")
    parser.add_argument("--weights", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    args.checkpoints.mkdir(exist_ok=True)
    set_checkpoint_manager(FileSystemCheckpointManager(str(args.checkpoints)))
    metrics.configure(metrics.ConsoleMetricHandler(), group="line")
    coordinator = CoordinatorP2P(
        c10d_backend="gloo",
        init_method=args.init_method,
        max_num_trainers=2,
        process_group_timeout=60000,
    )
    state: Any = torchelastic.train(coordinator, train_step, LineState(args.epochs))
    torch.save(state.model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
