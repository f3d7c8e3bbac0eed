"""What torch's own pages ask a script for at its end works after `train()`, by the documented command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist, torchelastic
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
coordinator = torchelastic.CoordinatorP2P("gloo")
def train_step(state):
    if state.step == 5:
        raise StopIteration
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 4)).mean().backward()
    state.optimizer.step()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = torchelastic.train(coordinator, train_step, torchelastic.ModelState(model, optimizer))
if len(sys.argv) > 2 and coordinator.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
if len(sys.argv) < 3:
    right = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(right)
    assert right.item() == sum(range(1, dist.get_world_size() + 1)), right
if dist.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
dist.destroy_process_group()
print("the end", flush=True)
"""


def run(folder: Path, launcher: list[str], *more: str) -> tuple[int, str]:
    """The script's exit code and output."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, *launcher, str(folder / "train.py"), str(folder / "model.pt"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


WORKERS = ["-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node=2", "--min-workers=2"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [WORKERS, []], ids=["two workers", "python alone"])
def test_barrier_reduction_rank_and_destroy_work(tmp_path: Path, launcher: list[str]) -> None:
    code, said = run(tmp_path, launcher)
    assert code == 0, said
    assert (tmp_path / "model.pt").exists()
    assert said.count("the end") == (2 if launcher else 1)


@pytest.mark.long
def test_a_rank_that_is_killed_after_training_costs_the_others_nothing_but_a_wait(tmp_path: Path) -> None:
    code, said = run(tmp_path, WORKERS, "kill")
    assert code == 1, said
    assert "killed by SIGKILL after it had finished training" in said
    assert (tmp_path / "model.pt").exists()
    assert said.count("the end") == 1
    assert "rank 1 ended after train(): this barrier has not waited for it" in said
