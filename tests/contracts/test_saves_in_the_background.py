"""Contract: a save in the background is of the values at the call, and the last one that was begun is the newest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import checkpoint as dcp

from tests.contracts.facades import KINDS, VARIANTS, Memory, Model, weights_at
from tests.older_torch import async_save_in, needs_helper_process
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint import BCPState, DiskTier, MemoryTier
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.memory import CheckpointContainerId

STEPS = (1, 2, 3)
GONE = -1.0


def training(folder: Path, tiers: Callable[[Path], list[DiskTier | MemoryTier]] | None = None) -> None:
    module = Model(weights_at(0))
    state = BCPState(module, None, tiers=tiers(folder)) if tiers else BCPState(module, None, default_ckpt_path=folder)
    for step in STEPS:
        module.weights.data.copy_(weights_at(step))
        state.save(sync=False)
        module.weights.data.fill_(GONE)
    state.wait()
    state.close()


def local(folder: Path, worker: Literal["thread", "persistent"]) -> None:
    manager, live = LocalCheckpointManager(folder), weights_at(0)
    with AsyncCallsQueue(worker=worker, timeout_s=60) as queue:
        for step in STEPS:
            live.copy_(weights_at(step))
            request = manager.save(BasicTensorAwareStateDict({"weights": live}), step, is_async=True)
            live.fill_(GONE)
            assert request is not None
            queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert manager.latest_iteration == STEPS[-1]
    manager.close()


def memory(folder: Path, place: Literal["thread", "process"]) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # DCP copies nothing without one
    live, writer = {"weights": weights_at(0)}, Memory.writer()
    for step in STEPS:
        live["weights"].copy_(weights_at(step))
        name = CheckpointContainerId.format_version_container(step)
        future = dcp.state_dict_saver.async_save(
            live, checkpoint_id=str(folder / name), storage_writer=writer, **async_save_in(place)
        )
        live["weights"].fill_(GONE)
        assert isinstance(future, Future)
        future.result(60)


JOBS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "training": ("training", training),
    "training-memory": ("training-memory", partial(training, tiers=lambda folder: [MemoryTier(folder)])),
    "local, thread": ("local", partial(local, worker="thread")),
    "local, persistent": ("local", partial(local, worker="persistent")),
    "memory, thread": ("memory", partial(memory, place="thread")),
    "memory, process": ("memory", partial(memory, place="process")),
}


def run(name: str, folder: Path) -> None:
    JOBS[name][1](folder)


#: Those that start an interpreter.
IN_PROCESSES = {"local, persistent": [pytest.mark.long], "memory, process": [pytest.mark.long, needs_helper_process]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=IN_PROCESSES.get(name, [])) for name in JOBS])
def test_what_training_does_meanwhile_is_not_in_it_and_the_last_one_is_resumed(name: str, tmp_path: Path) -> None:
    values(run_ranks(run, name, tmp_path / "saved"))
    facade = KINDS.get(JOBS[name][0]) or VARIANTS[JOBS[name][0]][1]
    assert facade.resume(tmp_path / "saved") == STEPS[-1]
