"""What the jobs of the SLURM tests train: one rank of a small model in DDP, with an IterManager and a BCPState.

Each rank appends a line for each step to its ledger: the step, the samples, and which run of the job it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchelastic.checkpoint import BCPState
from torchelastic.lifetime import IterManager, requeue_job

SAMPLES, BATCH, STEPS = 64, 4, 400


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))


def samples_of(step: int, rank: int, world_size: int) -> list[int]:
    """Each rank's part of a step, drawn without a state: the data position is the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randperm(SAMPLES, generator=generator)[rank : BATCH * world_size : world_size].tolist()


class Training:
    """One rank of one run of the job."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.step = 0
        self.model = model_of(7 + rank)
        wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(11))
        self.wrapped = wrapped
        self.state = BCPState(
            wrapped, self.optimizer, "ddp", lambda: {"step": self.step}, folder / "velastic" / "checkpoint"
        )
        self.ledger = (folder / f"ledger-{rank}.jsonl").open("ab", buffering=0)

    def train_step(self) -> None:
        samples = samples_of(self.step, self.rank, self.world_size)
        inputs = self.inputs[samples]
        loss = (self.wrapped(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        line = {"run": self.run, "step": self.step, "samples": samples, "loss": loss.item().hex()}
        self.ledger.write(json.dumps(line).encode() + b"\n")

    def finish(self) -> None:
        if self.rank == 0:
            torch.save(self.model.state_dict(), self.folder / "final.new")
            (self.folder / "final.new").replace(self.folder / "final.pt")


def train(training: Training, manager: IterManager, pause_s: float) -> None:
    extra = training.state.maybe_resume_from_ckpt()
    training.step = manager.iter_count = 0 if extra is None else extra["step"]
    while training.step < STEPS:
        manager.iter()
        if manager.should_save_ckpt():
            with manager.saving():
                training.state.save()
        if manager.should_stop:
            return
        training.train_step()
        time.sleep(pause_s)
    training.finish()
    manager.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, in the first run only")
    parser.add_argument("--ends-in", type=int, metavar="S", help="from its first step, in the first run only")
    parser.add_argument("--requeue", action="store_true", help="the job requeues itself")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    job_id, run = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    element = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    folder: Path = options.folder / element
    folder.mkdir(exist_ok=True)
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    where = f"file://{folder}/store-{job_id}-{run}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    if rank == 0 and run == "0" and options.ends_in is not None:
        name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{element}" if element else job_id
        subprocess.run(["scontrol", "update", f"JobId={name}", f"EndTime=now+{options.ends_in}"], check=True)
    dist.barrier()
    manager = IterManager(STEPS, redundant_time=2, save_ckpt_time=1, velastic_dir=folder / "velastic")
    train(Training(folder, rank, world_size), manager, options.pause if run == "0" else 0.0)
    if manager.should_stop and options.requeue and rank == 0:
        print(requeue_job(), flush=True)
    dist.destroy_process_group()
    return manager.exit_code


if __name__ == "__main__":
    sys.exit(main())
