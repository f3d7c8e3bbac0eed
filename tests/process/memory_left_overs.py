"""What a job of one rank leaves in memory when it is killed, for the tests of those who look at it afterwards."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.process.forked_ranks import run_ranks
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId
from torchelastic.checkpoint.memory import CheckpointObjectManager, DefaultCheckpointSaver, MemoryStorageWriter

#: An extra file, as an adapter attaches them.
COMMON = b"what is common"


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.arange(12.0).view(4, 3) + step, "opt": {"lr": 0.5, "m": torch.ones(3, dtype=torch.int64)}}


def left_by_a_killed_job(base: Path, *steps: int) -> Path:
    """Saves in a process of its own, which is then killed; returns the container of the last step.

    Args:
        base: the container of the job, whose run id is "job7".
        steps: one after the other.
    """
    (ended,) = run_ranks(_save_and_be_killed, str(base), steps, environments=[{"TORCHELASTIC_RUN_ID": "job7"}])
    assert ended.exit_code == -signal.SIGKILL, ended.error
    return base / CheckpointContainerId.format_version_container(steps[-1])


def _save_and_be_killed(base: str, steps: Sequence[int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    saver = DefaultCheckpointSaver(ckpt_obj_manager=CheckpointObjectManager())
    attaching: Any = _Attaching  # to mypy it is abstract, since torch's protocol of stagers has empty methods
    writer = attaching(saver)
    for step in steps:
        folder = f"{base}/{CheckpointContainerId.format_version_container(step)}"
        save(state_of(step), checkpoint_id=folder, storage_writer=writer)
    os.kill(os.getpid(), signal.SIGKILL)


class _Attaching(MemoryStorageWriter):
    def reset(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None = None) -> None:
        super().reset(checkpoint_id)
        self.attach("common.pt", COMMON)
