"""A train step that saves by itself: a worker lost in a save costs that step, as any loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.older_torch import needs_helper_process

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
@pytest.mark.daily
def test_who_survives_a_loss_in_a_save_of_the_step_trains_on_in_the_same_process(jobs: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=3", str(tmp_path / "train.py"))
    job.wait()
    assert "killed by SIGKILL" in job.output()
    finished = (tmp_path / "notes").read_text().splitlines()
    assert {f"{rank} finished in start 0, saved 5" for rank in (0, 2)} <= set(finished), job.output()[-3000:]


DCP_SCRIPT = """
import os, pathlib, signal
import torch, torchelastic
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchelastic.checkpoint.memory import (
    CheckpointContainerId, CheckpointObjectManager, DefaultCheckpointSaver, MemoryStorageWriter
)
from torchelastic.checkpoint.replication import ReplicationManager

FOLDER = pathlib.Path(__file__).parent
RANK_OF_START, START = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def main():
    base = CheckpointContainerId(f"{FOLDER}/job")
    objects, replication = CheckpointObjectManager(), ReplicationManager()
    saver = DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=replication)
    writer, formed, running = MemoryStorageWriter(saver, needs_replicas=False), [], []
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    coordinator = torchelastic.CoordinatorP2P("gloo")

    def train_step(state):
        if formed[:1] != [dist.group.WORLD]:
            replication.initialize(objects)
            formed[:] = [dist.group.WORLD, dist.new_group(backend="gloo"), state.step]
        if dist.get_world_size() == 2 and state.step >= max(formed[2] + 2, 4):
            raise StopIteration
        state.model(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()
        if (state.step, RANK_OF_START, START) == (2, "1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        name = CheckpointContainerId.format_version_container(state.step)
        running.append(dcp.async_save(
            {"model": state.module.state_dict()}, storage_writer=writer, process_group=formed[1],
            checkpoint_id=str(CheckpointContainerId.create_child(base, name)),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ))

    torchelastic.train(coordinator, train_step, state)
    running[-1].result()
    with (FOLDER / "notes").open("a") as file:
        file.write(f"{RANK_OF_START} of start {START}\\n")


if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@needs_helper_process
def test_helper_processes_of_async_save_are_started_anew_when_a_worker_was_replaced(
    jobs: MakeJob, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(DCP_SCRIPT)
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=2", str(tmp_path / "train.py"))
    job.wait()
    assert "killed by SIGKILL" in job.output()
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes) == ["0 of start 0", "1 of start 1"], job.output()[-3000:]
