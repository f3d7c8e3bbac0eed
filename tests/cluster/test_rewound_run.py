"""A whole run whose loss has become NaN, and that is taken back to a checkpoint of before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS, SPOILT_AT, KEPT_STEP = 20, 13, 10
AT_ONCE = -2

PROGRAM = f"""
import os, sys
import torch, torchelastic
from torchelastic.checkpoint import DiskTier, EverySteps, KeepLast, MemoryTier, TieredCheckpointManager

memory, disk, out, spoilt_at = sys.argv[1:]
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = torchelastic.ElasticBatchSampler(dataset, global_batch_size=12, epochs=1)
loader = torchelastic.ElasticLoader(dataset, sampler)
state = torchelastic.ModelState(model, optimizer, sampler=sampler, logical_shards=4)
tiers = [MemoryTier(memory), DiskTier(disk, KeepLast(4), EverySteps({KEPT_STEP} // 2))]
manager = TieredCheckpointManager(tiers, policy=EverySteps(1))


def train_step(state):
    manager.wait()  # on a busy host, saves would be deferred else
    total = 0.0
    for inputs, targets in state.shards(loader):
        loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
        (loss * float("nan") if state.step == int(spoilt_at) else loss).backward()
        total += float(loss)
    if total != total or int(spoilt_at) == {AT_ONCE}:
        raise FloatingPointError(f"the loss is NaN in step {{state.step}}")
    state.optimizer.step()
    print("trained", state.step, flush=True)


torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state, checkpoint=manager)
if int(os.environ["RANK"]) == 0:
    torch.save(state.module.state_dict(), out)
"""


def started(folder: Path, name: str, memory: Path, spoilt_at: int) -> subprocess.CompletedProcess[str]:
    """A life of the run, to its end."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torchelastic", "run", "--standalone", "--rdzv-id", "spoilt"]
    command = [*launcher, "--nproc-per-node", "2", "--max-restarts", "0"]
    arguments = [str(memory), str(folder / f"disk-{name}"), str(folder / f"{name}.pt"), str(spoilt_at)]
    return subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_was_spoilt_is_taken_back_and_ends_as_if_nothing_had_been(tmp_path: Path, tmpfs: Path) -> None:
    spoilt = started(tmp_path, "run", tmpfs / "run", SPOILT_AT)
    assert spoilt.returncode != 0
    assert "the loss is NaN in step" in spoilt.stdout + spoilt.stderr
    assert "checkpoint rewind" not in spoilt.stdout + spoilt.stderr
    once_more = started(tmp_path, "run", tmpfs / "run", AT_ONCE)
    assert once_more.returncode != 0
    said = re.search(r"after the checkpoint of step (\d+) was restored.*rewind FOLDER --to (\d+)`", once_more.stderr)
    assert said is not None, once_more.stderr
    assert int(said[1]) == int(said[2]) + 1
    disk = tmp_path / "disk-run"
    rewound = subprocess.run(
        [sys.executable, "-m", "torchelastic", "checkpoint", "rewind", str(disk), "--to", str(KEPT_STEP)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rewound.returncode == 0, rewound.stderr
    assert f"the run goes on from step {KEPT_STEP}" in rewound.stdout

    again = started(tmp_path, "run", tmpfs / "run", -1)
    assert again.returncode == 0, again.stdout + again.stderr
    trained = {int(line.split("trained ")[1]) for line in again.stdout.splitlines() if "trained " in line}
    assert trained == set(range(KEPT_STEP, STEPS)), "it did not go on from there"
    undisturbed = started(tmp_path, "undisturbed", tmpfs / "other", -1)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    ends, expected = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("run", "undisturbed"))
    assert all(torch.equal(ends[name], expected[name]) for name in expected)
