"""A small elastic training job, to see that an image and a cluster work; put yours in its place.

torchelastic run --standalone deploy/docker/job/train.py --checkpoint-dir /tmp/checkpoints --steps 500
"""

from __future__ import annotations

import argparse
import time

import torch

import torchelastic
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.p2p import CoordinatorP2P


class Regression(torchelastic.ModelState):
    """Saves every so many steps."""

    save_every = 100

    def should_save_checkpoint(self, rank: int) -> bool:
        """Whether to save after this step, asked on every rank."""
        del rank
        return self.step % self.save_every == 0


def main() -> None:
    """Fit a line, slowly enough to watch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--steps", type=int, default=36000)
    parser.add_argument("--step-s", type=float, default=0.1, help="pause in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    coordinator = CoordinatorP2P()

    def train_step(state: Regression) -> None:
        if state.step >= options.steps:
            raise StopIteration
        inputs = torch.randn(32, 8)
        state.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(state.model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        state.optimizer.step()
        if coordinator.rank == 0 and state.step % 100 == 0:
            print(f"step {state.step}: loss {loss.item():.6f}, {coordinator.world_size} workers", flush=True)  # noqa: T201
        time.sleep(options.step_s)

    state = Regression(model, optimizer)
    torchelastic.train(coordinator, train_step, state, checkpoint=FileSystemCheckpointManager(options.checkpoint_dir))


if __name__ == "__main__":
    main()
