"""Ranks that save into memory through DCP: a failure domain and a container of its own for each host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tests.process.memory_ranks import base_of
from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import is_commit
from torchelastic.checkpoint.format.disk import HIDDEN, REAL_DISK, Disk
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager, ReplicationRetryConfig
from torchelastic.checkpoint.store.save_id import ShardId

State = dict[str, Any]


@dataclass
class Saving:
    """One rank, as it saves and loads."""

    manager: CheckpointObjectManager
    replication: ReplicationManager
    writer: MemoryStorageWriter
    loader: DefaultCheckpointLoader
    base: Path

    @property
    def container(self) -> Container:
        return self.manager.container(self.base)

    @property
    def saver(self) -> DefaultCheckpointSaver:
        return self.writer.checkpoint_saver

    def id(self, step: int) -> str:
        version = CheckpointContainerId.format_version_container(step)
        return str(CheckpointContainerId.create_child(CheckpointContainerId(str(self.base)), version))

    def save(self, state: State, step: int, **options: Any) -> Any:
        return quietly(save, state, checkpoint_id=self.id(step), storage_writer=self.writer, **options)

    def async_save(self, state: State, step: int, **options: Any) -> Any:
        return quietly(async_save, state, checkpoint_id=self.id(step), storage_writer=self.writer, **options)

    def load(self, state: State, step: int, **options: Any) -> State:
        reader = MemoryStorageReader(self.id(step), self.loader, **options)
        quietly(load, state, checkpoint_id=self.id(step), storage_reader=reader)
        return state

    def latest(self) -> int | None:
        found = self.loader.get_latest_complete_checkpoint(self.base)
        return None if found is None else CheckpointContainerId.parse_version_container_step(found.name)

    def steps(self) -> list[int]:
        """The steps that are complete on this host, by what lies there."""
        return sorted(one.name.step for one in self.container.inventory() if one.is_committed)

    def files(self) -> list[str]:
        """All shards and slots of this host's container."""
        hidden = [path for path in self.base.iterdir() if path.is_file() and path.name.startswith(HIDDEN)]
        found = [*hidden, *self.base.glob("step-*/shard-*.shard")]
        return sorted(str(path.relative_to(self.base)) for path in found)

    def shards(self) -> list[str]:
        """Those that ranks have saved, of all saves."""
        return [name for name in self.files() if "shard-" in name and not is_commit(ShardId.parse(name))]

    def inodes(self) -> set[int]:
        """Of what ranks have saved, and of the slots for more."""
        hidden = [name for name in self.files() if name.startswith(HIDDEN)]
        return {(self.base / name).stat().st_ino for name in [*hidden, *self.shards()]}


def quietly(function: Any, *arguments: Any, **options: Any) -> Any:
    """DCP warns of what these tests do on purpose: to save without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return function(*arguments, **options)


@contextmanager
def saving(
    root: str | Path,
    hosts: str = "a",
    *,
    disk: Disk = REAL_DISK,
    silent_s: float = 30.0,
    kind: Any = MemoryStorageWriter,
    **options: Any,
) -> Iterator[Saving]:
    """A rank of a job; `hosts` has a letter per rank. Options are those of the kind of writer."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{hosts[rank]}"
    manager, replication = CheckpointObjectManager(disk=disk), ReplicationManager()
    replication.initialize(manager, 0, ReplicationRetryConfig(max_retries=1, timeout_seconds=silent_s))
    saver = DefaultCheckpointSaver(ckpt_obj_manager=manager, replication_manager=replication)
    writer = kind(saver, **options)
    loader = DefaultCheckpointLoader(manager, replication)
    try:
        yield Saving(manager, replication, writer, loader, base_of(root, hosts[rank]))
    finally:
        replication.shutdown()
        manager.teardown_pool()


def blank(state: Any) -> Any:
    """The same structure with zeros, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.detach(), memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(blank(value) for value in state)
    return type(state)() if isinstance(state, (int, float, str)) else None


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        mine, theirs = (one.detach().resolve_conj().resolve_neg().contiguous() for one in (left, right))
        return torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right)
