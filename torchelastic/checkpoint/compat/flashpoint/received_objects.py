"""Shards of other hosts' checkpoints on their way into this host's containers, and what is given away from there."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from torchelastic.checkpoint.compat.flashpoint.commit import Commit, commit_from
from torchelastic.checkpoint.compat.flashpoint.ids import is_commit, object_of, parse_object
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.format.stage import tensors_of
from torchelastic.checkpoint.format.tree import unflatten
from torchelastic.checkpoint.store.received_shards import ReceivedShards
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.checkpoint.store.writing import make_place

Answer = TypeVar("Answer")
#: A commit holds metadata and small attached files; nobody may fill this host's memory with one.
MOST_COMMIT_BYTES = 1 << 30


class HoldsShards(Protocol):
    """What is needed of a `Container` here, which has a shelf of its own.

    Attributes:
        name: the last part of its folder.
        root: the folder.
        disk: what touches files.
        shelf: receives shards and commits from other hosts.
    """

    name: str
    root: Path
    disk: Disk
    shelf: ContainerShelf

    def complete(self, commit: Commit) -> None:
        """Make a save a checkpoint on this host."""

    def tidy(self) -> list[int]:
        """Remove what the newest checkpoint has replaced."""


class ContainerShelf(ReceivedShards):
    """The shards of one container. A commit comes into memory of its own: it must not use up the slot of a shard.

    A commit that is pushed completes its save, and removes what that replaces. One that this process has asked for
    (`fetching`) replaces nothing yet: whoever fetches it knows when it does.

    Args:
        container: where they lie.
    """

    def __init__(self, container: HoldsShards) -> None:
        super().__init__(container.root, container.disk)
        self._container = container
        self._commits: dict[str, mmap.mmap] = {}

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`."""
        if is_commit(ShardId.parse(object_id)):
            memory = self._commits[self._fetch + object_id] = _room_for_commit(object_id, size_bytes)
            return memoryview(memory)
        if not self.is_warm(size_bytes):
            self._container.tidy()  # who saves does too, but another process cannot free the slots of this one
        return super().destination(object_id, size_bytes)

    def received(self, object_id: str, digest: str | None) -> None:
        """See `ReplicaStore`.

        Raises:
            CorruptCheckpointError: what was received is no commit, or no whole shard.
            CheckpointError: it cannot be published.
        """
        memory = self._commits.pop(self._fetch + object_id, None)
        if memory is None:
            super().received(object_id, digest)
            return
        path, where = self.path_of(object_id), f"the copy of {object_id}"
        header, tensors = tensors_of(torch.frombuffer(memory, dtype=torch.uint8), where)
        commit = commit_from(header.meta, unflatten(header.structure, tensors))
        if str(commit.shard) != object_id:
            raise CorruptCheckpointError(f"{where} is the commit of {commit.name}")
        make_place(path.parent, self.disk)
        write_whole(path, [memoryview(memory)], self.disk)
        if not self._fetch:
            self._container.complete(commit)
            self._container.tidy()

    def abort(self, object_id: str) -> None:
        """See `ReplicaStore`."""
        if self._commits.pop(self._fetch + object_id, None) is None:
            super().abort(object_id)


class ReceivedObjects:
    """A `ReplicaStore` over containers; see `ids.object_of`. May be used by several threads.

    Args:
        find: the container of a name; None if this process knows none.
        names: of all containers.
    """

    def __init__(self, find: Callable[[str], HoldsShards | None], names: Callable[[], Sequence[str]]) -> None:
        self._find = find
        self._names = names

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`. Raises: ValueError if it is no shard of a container that is known here."""
        shelf, shard = self._place(object_id)
        return shelf.destination(shard, size_bytes)

    def received(self, object_id: str, digest: str) -> None:
        """See `ReplicaStore`, and `ContainerShelf`."""
        shelf, shard = self._place(object_id)
        shelf.received(shard, digest)

    def abort(self, object_id: str) -> None:
        """See `ReplicaStore`."""
        shelf, shard = self._place(object_id)
        shelf.abort(shard)

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaStore`; None also for what can be no object here."""
        return self._if_here(object_id, ContainerShelf.source)

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaStore`; None as for `source`."""
        return self._if_here(object_id, ContainerShelf.digest)

    def ids(self) -> list[str]:
        """See `ReplicaStore`."""
        containers = filter(None, map(self._find, self._names()))
        return [object_of(one.name, ShardId.parse(shard)) for one in containers for shard in one.shelf.ids()]

    def _if_here(self, object_id: str, ask: Callable[[ContainerShelf, str], Answer | None]) -> Answer | None:
        try:
            shelf, shard = self._place(object_id)
        except ValueError:
            return None
        return ask(shelf, shard)

    def _place(self, object_id: str) -> tuple[ContainerShelf, str]:
        name, shard = parse_object(object_id)
        container = self._find(name)
        if container is None:
            raise ValueError(
                f"no container named {name!r} is in use here: all ranks have to use containers whose paths end with "
                "the same name"
            )
        return container.shelf, str(shard)


def _room_for_commit(object_id: str, size_bytes: int) -> mmap.mmap:
    if not 0 < size_bytes <= MOST_COMMIT_BYTES:
        raise ValueError(f"{object_id} has {size_bytes} bytes: a commit has 1 to {MOST_COMMIT_BYTES}")
    return mmap.mmap(-1, size_bytes)
