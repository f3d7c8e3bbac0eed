"""Ranks that save into memory through DCP, by public names alone; each is a host of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException

from tests.older_torch import async_save_in
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly


def container_of(root: Path, host: int) -> Path:
    """The container of the job on one host."""
    return root / f"host-{host}" / "job"


def folder_of(root: Path, host: int, step: int) -> Path:
    """The container of a step on one host."""
    return container_of(root, host) / CheckpointContainerId.format_version_container(step)


def shards_of(root: Path, host: int, step: int) -> list[Path]:
    """The shards of a step on one host: those of the ranks, and the one behind with the metadata."""
    return sorted(container_of(root, host).glob(f"step-{step:09d}.*/shard-*.shard"))


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """What a rank saves: what all have alike, and its own, of which shape and values are each rank's own too."""
    own = torch.arange(300 + 200 * rank, dtype=torch.float32) + 1000 * step + rank
    return {"weights": torch.arange(400, dtype=torch.float32) + 1000 * step, f"weights of rank {rank}": own}


@contextmanager
def parts(host: int, disk: Disk = REAL_DISK) -> Iterator[tuple[MemoryStorageWriter, DefaultCheckpointLoader]]:
    """What saves and what loads on a rank that is a host of its own."""
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{host}"
    objects, replication = CheckpointObjectManager(disk=disk), ReplicationManager()
    replication.initialize(objects)
    saver = DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=replication)
    try:
        yield MemoryStorageWriter(saver, on_failure="raise"), DefaultCheckpointLoader(objects, replication)
    finally:
        replication.shutdown()


def save(root: Path, step: int, disk: Disk = REAL_DISK, **more: Any) -> None:
    """Save a step on all ranks, replicated; with more than tensors, if that is given."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with parts(rank, disk) as (writer, _):
        dcp.save(state_of(rank, step) | more, checkpoint_id=str(folder_of(root, rank, step)), storage_writer=writer)


def candidates(root: Path) -> list[str]:
    """The checkpoints that a rank without others can recover, newest first."""
    with parts(0) as (_, loader):
        return [found.name for found in loader.get_candidate_checkpoints(container_of(root, 0))]


def recover(root: Path, saved_by: int | None = None) -> tuple[int | None, bool]:
    """The step that is found on this rank, and whether what is loaded of it is what was saved.

    Args:
        root: of all hosts.
        saved_by: how many ranks saved it; None: as many as there are now.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    with parts(rank) as (_, loader):
        latest = loader.get_latest_complete_checkpoint(container_of(root, rank))
        step = None if latest is None else CheckpointContainerId.parse_version_container_step(latest.name)
        if step is None:
            return None, True
        expected = state_of(rank, step)
        if saved_by is not None and rank >= saved_by:
            del expected[f"weights of rank {rank}"]  # nobody has saved it
        state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(state, checkpoint_id=str(latest), storage_reader=MemoryStorageReader(checkpoint_loader=loader))
        loader.wait_for_replicas(30.0)
        if dist.is_initialized():
            dist.barrier()  # the others may still fetch from this one
        return step, all(torch.equal(state[name], expected[name]) for name in expected)


def save_with_helpers(root: Path, victim: int, *, during: bool) -> list[str]:
    """Saves three steps with DCP's helper process; how each save ended.

    Args:
        root: of all hosts.
        victim: the rank whose helper is killed.
        during: while it is at the second save, and not after the first.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    ended = []
    with parts(rank) as (writer, _):
        for step in (1, 2, 3):
            future = dcp.async_save(
                state_of(rank, step),
                checkpoint_id=str(folder_of(root, rank, step)),
                storage_writer=writer,
                **async_save_in("process"),
            )
            if during and step == 2 and rank == victim:
                _kill_helper()
            try:
                future.result(50)
                ended.append("saved")
            except Exception as error:
                ended.append(f"{type(error).__name__}: {error}"[:300])
            if not during and step == 1 and rank == victim:
                _kill_helper()
            dist.barrier()
    return ended


def load(state: dict[str, torch.Tensor], checkpoint_id: str, loader: DefaultCheckpointLoader) -> None:
    """Has DCP read a checkpoint. Raises: what a rank has raised, without DCP's wrapper around it."""
    try:
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=MemoryStorageReader(checkpoint_loader=loader))
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _kill_helper() -> None:
    (helper,) = multiprocessing.active_children()
    assert helper.pid
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and for its parent to reap
