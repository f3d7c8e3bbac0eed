"""A script of its own (`python stopping_job.py`) with a coordinator and an IterManager, made in either order.

Writes down its steps in the folder --out, as the training job of the cluster tests does, and the moment in which its
manager told it to save.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import torchelastic
from tests.cluster.elastic_job import EventLog, hold_until
from torchelastic.lifetime import IterManager
from torchelastic.p2p import CoordinatorP2P, step_agreement

STEPS, GATE = 40, 10


class Counter(torchelastic.State):
    """The number of steps, of which every one adds the same on all ranks."""

    def __init__(self) -> None:
        self.step = 0

    def sync(self, world_size: int, rank: int) -> None:
        del world_size, rank
        step = torch.tensor([self.step])
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        self.step = int(step)

    def snapshot(self) -> int:
        return self.step

    def apply(self, snapshot: int) -> None:
        self.step = snapshot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init-method", required=True)
    parser.add_argument("--first", choices=["coordinator", "deadline"], required=True)
    parser.add_argument("--world", type=int, required=True, help="of the group that waits in the middle")
    parser.add_argument("--hangs", action="store_true", help="in the middle; else it waits there until somebody leaves")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    step_agreement.interval_steps = lambda *_: 1
    log = EventLog(options.out)

    def make_manager() -> IterManager:
        return IterManager(total_iters=STEPS, velastic_dir=options.out / ".velastic")

    manager = make_manager() if options.first == "deadline" else None
    coordinator = CoordinatorP2P(init_method=options.init_method)
    manager = make_manager() if manager is None else manager
    state = Counter()

    def train_step(state: Counter) -> None:
        manager.iter()
        if manager.should_save_ckpt():
            log("told to save", step=state.step)
        if state.step == GATE and coordinator.world_size == options.world:
            log("held", step=state.step, rank=coordinator.rank, world=coordinator.world_size)
            hold_until(lambda: not options.hangs and coordinator.somebody_leaves(), "somebody leaves")
        if state.step >= STEPS:
            raise StopIteration
        dist.all_reduce(torch.ones(1))
        state.step += 1

    torchelastic.train(coordinator, train_step, state)
    manager.close()
    log("finished", step=state.step, rank=coordinator.rank)
    sys.exit(manager.exit_code)


if __name__ == "__main__":
    main()
