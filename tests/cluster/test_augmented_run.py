"""A whole run whose dataset and collate_fn draw at random, in worker processes, and that loses a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS, KILLED_AT = 16, 5

PROGRAM = f"""
import os, random, signal, sys
import numpy as np
import torch, torchelastic

out, num_workers, mark = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Crops(torch.utils.data.Dataset):
    def __init__(self):
        self.images = torch.arange(64.0 * 12 * 12).reshape(64, 12, 12) / 9216
        self.brightness = np.random.default_rng(0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left = random.randint(0, 4), np.random.randint(5)
        image = self.images[index, top : top + 8, left : left + 8]
        image = image.flip(1) if torch.rand(()) < 0.5 else image
        return image * float(self.brightness.uniform(0.5, 1.5)), torch.tensor(float(index % 7))


def mixed(samples):
    images, targets = torch.utils.data.default_collate(samples)
    part = random.random()
    return images.lerp(images.flip(0), part), targets.lerp(targets.flip(0), part)


if __name__ == "__main__":
    dataset = Crops()
    sampler = torchelastic.ElasticBatchSampler(dataset, global_batch_size=8, epochs={STEPS} // 8)
    loader = torchelastic.ElasticLoader(dataset, sampler, num_workers=num_workers, collate_fn=mixed)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    state = torchelastic.ModelState(
        model, torch.optim.Adam(model.parameters(), lr=0.01), sampler=sampler, logical_shards=4
    )

    def train_step(state):
        state.optimizer.zero_grad()
        for images, targets in state.shards(loader):
            torch.nn.functional.mse_loss(state.model(images).squeeze(1), targets).backward()
        if state.step == {KILLED_AT} and os.environ["RANK"] == "1" and mark and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.optimizer.step()

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
    if os.environ.get("RANK", "0") == "0":
        torch.save((state.step, state.module.state_dict()), out)
"""


def run(folder: Path, nproc: int, num_workers: int, mark: Path | str = "") -> dict[str, torch.Tensor]:
    """A whole life of the run; returns its weights."""
    script, out = folder / "train.py", folder / f"{nproc}-{num_workers}.pt"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torchelastic", "run", "--standalone", "--nproc-per-node", str(nproc)]
    ended = subprocess.run(
        [*command, str(script), str(out), str(num_workers), str(mark)],
        capture_output=True, text=True, timeout=200, cwd=folder, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    step, weights = torch.load(out)
    assert step == STEPS
    return dict(weights)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_augmentations_are_those_of_an_undisturbed_run_whoever_draws_them(tmp_path: Path) -> None:
    undisturbed = run(tmp_path, nproc=1, num_workers=0)
    killed = tmp_path / "killed"
    disturbed = run(tmp_path, nproc=2, num_workers=2, mark=killed)
    assert killed.exists()
    for name, weights in undisturbed.items():
        assert torch.equal(weights, disturbed[name]), name
