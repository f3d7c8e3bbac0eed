"""A train step that saves with a `LocalCheckpointManager`: a worker lost in a save costs that step, as any loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob

SCRIPT = """
import os, pathlib, signal
import torch, torchelastic
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

FOLDER = pathlib.Path(__file__).parent
RANK_OF_START, START = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
manager = LocalCheckpointManager(FOLDER / f"host-{RANK_OF_START}", timeout_s=60)


def train_step(state):
    if state.step == 6:
        raise StopIteration
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    if (state.step, RANK_OF_START, START) == (3, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)  # the others are in the save by then, or come to it
    manager.save(BasicTensorAwareStateDict({"model": state.module.state_dict()}), state.step)


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
with (FOLDER / "notes").open("a") as file:
    file.write(f"{RANK_OF_START} finished in start {START}, saved {manager.latest_iteration}\\n")
"""


@pytest.mark.long
def test_who_survives_a_loss_in_a_save_of_the_step_trains_on_in_the_same_process(jobs: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=3", str(tmp_path / "train.py"))
    job.wait()
    assert "killed by SIGKILL" in job.output()
    finished = (tmp_path / "notes").read_text().splitlines()
    assert {f"{rank} finished in start 0, saved 5" for rank in (0, 2)} <= set(finished), job.output()[-3000:]
