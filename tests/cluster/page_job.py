"""The training job that the tests look at in a browser: it publishes a loss, saves, prints, and does not end."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch

import torchelastic
from torchelastic import metrics
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.p2p import CoordinatorP2P, step_agreement

#: What a user might have called a metric, and a prototype pollution would.
HOSTILE_NAME = "<img src=x onerror=document.title='taken'>"
PROTO = "__proto__"


class SavingState(torchelastic.ModelState):
    every = 25

    def should_save_checkpoint(self, rank: int) -> bool:
        return self.step % self.every == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--hostile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step_agreement.interval_steps = lambda *_: 1
    metrics.configure(metrics.PrometheusMetricHandler())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(240, 4, generator=torch.Generator().manual_seed(3))
    dataset = torch.utils.data.TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)))
    sampler = ElasticBatchSampler(240, 24, epochs=100_000, seed=3)
    loader = ElasticLoader(dataset, sampler)
    state = SavingState(model, optimizer, sampler=sampler)
    coordinator = CoordinatorP2P()
    (options.out / f"pid-{os.environ['LOCAL_RANK']}-{os.getpid()}").touch()
    print("\x1b[32mready\x1b[0m <script>document.title='taken'</script>", flush=True)

    def train_step(state: torchelastic.ModelState) -> None:
        optimizer.zero_grad()
        for inputs, targets in state.shards(loader):
            time.sleep(options.step_ms / 1000)
            torch.nn.functional.mse_loss(state.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step = state.step
        loss = 2.1 * math.exp(-step / 300) + 0.35 + 0.04 * math.sin(step * 1.7)
        metrics.publish_metric("", "loss", loss)
        if options.hostile:
            metrics.publish_metric("", HOSTILE_NAME, 1.5)
            metrics.publish_metric("", PROTO, 2.5)
        if step % 10 == 0:
            print(
                f"step {step}  loss {loss:.4f}  lr 5.0e-02  {24 / (options.step_ms / 1000):.0f} samples/s", flush=True
            )

    manager = FileSystemCheckpointManager(str(options.out / "saved"))
    torchelastic.train(coordinator, train_step, state, checkpoint=manager)


if __name__ == "__main__":
    main()
