"""What a run has trained last is saved when it ends, if the policy says so or a save was due and found no free slot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS = 12

PROGRAM = f"""
import os, sys, time
import torch, torchelastic
from torchelastic.checkpoint import DiskTier, EverySteps, KeepLast, OnEnd, TieredCheckpointManager

disk, out, takes_s, form, policy = sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:]


class Slow(DiskTier):
    def put(self, shard):
        time.sleep(takes_s)
        return super().put(shard)


torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn({STEPS} * 8, 8), torch.randn({STEPS} * 8, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
sampler = torchelastic.ElasticBatchSampler(dataset, global_batch_size=8, epochs=1)
loader = torchelastic.ElasticLoader(dataset, sampler)
state = torchelastic.ModelState(model, torch.optim.Adam(model.parameters(), lr=0.01), sampler=sampler)
manager = TieredCheckpointManager([Slow(disk, KeepLast(20))], policy=eval(policy))


def train_step(state):
    inputs, targets = next(loader)
    loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()


coordinator = torchelastic.CoordinatorP2P("gloo")
if form == "train":
    torchelastic.train(coordinator, train_step, state, checkpoint=manager)
else:
    for step in torchelastic.steps(coordinator, state, checkpoint=manager):
        with step:
            train_step(state)
        if state.step == {STEPS}:
            step.stop_training()
torch.save((state.step, state.module.state_dict()), f"{{out}}.{{os.environ['RANK']}}")
"""


def run(folder: Path, name: str, takes_s: float, form: str, policy: str = "EverySteps(1)") -> str:
    """A whole life of the run on two workers; returns what the launcher has said."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torchelastic", "run", "--standalone", "--rdzv-id", "deferred"]
    command = [*launcher, "--nproc-per-node", "2", str(script), str(folder / "disk"), str(folder / name)]
    ended = subprocess.run(
        [*command, str(takes_s), form, policy], capture_output=True, text=True, timeout=180, cwd=folder, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def saved_in(folder: Path) -> list[int]:
    """The steps of the checkpoints, ascending."""
    return sorted(int(one.name[5:14]) for one in (folder / "disk").glob("step-*"))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "steps"), [("EverySteps(5) | OnEnd()", [5, 10, STEPS]), ("EverySteps(4) | OnEnd()", [4, 8, STEPS])]
)
def test_what_was_trained_last_is_saved_once_when_the_run_ends(tmp_path: Path, policy: str, steps: list[int]) -> None:
    run(tmp_path, "first", 0.0, "train", policy)
    assert saved_in(tmp_path) == steps
    run(tmp_path, "again", 0.0, "train", policy)
    assert saved_in(tmp_path) == steps, "a run that had nothing to train has saved"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["train", "steps"])
def test_the_last_step_of_a_run_is_saved_if_a_save_was_due_and_no_slot_was_free(tmp_path: Path, form: str) -> None:
    said = run(tmp_path, "first", 0.5, form)
    assert "the save is deferred, all slots are busy" in said
    saved = saved_in(tmp_path)
    assert saved[-1] == STEPS, f"only {saved} are saved"
    assert len(saved) < STEPS, "no save was deferred"
    run(tmp_path, "again", 0.0, form)
    for rank in range(2):
        first, again = (torch.load(tmp_path / f"{name}.{rank}", weights_only=True) for name in ("first", "again"))
        assert (first[0], again[0]) == (STEPS, STEPS), "a run that is over was trained on"
        assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
