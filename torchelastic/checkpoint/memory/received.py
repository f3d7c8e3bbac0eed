"""Objects of other hosts' checkpoints on their way into this host's containers, and what is given away from there."""

from __future__ import annotations

import copy
import mmap
import secrets
import threading
from collections.abc import Callable, Sequence

import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.memory.commit import Commit, commit_from, objects_of
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, ObjectName, require_shard
from torchelastic.checkpoint.shards.image import tensors_of
from torchelastic.checkpoint.shards.slot_replica_store import sealed_bytes
from torchelastic.checkpoint.shards.tree import unflatten
from torchelastic.checkpoint.store.save_id import find_shard

#: A commit holds metadata and small extra files; nobody may fill this host's memory with one.
MOST_COMMIT_BYTES = 1 << 30


class ReceivedObjects:
    """A `ReplicaStore` over containers; an object's id is the text of its `ObjectName`. May be used by several threads.

    Args:
        find: the container of a name; None if this process knows none.
        names: of all containers.
    """

    def __init__(self, find: Callable[[str], Container | None], names: Callable[[], Sequence[str]]) -> None:
        self._find = find
        self._names = names
        self._lock = threading.Lock()
        self._commits: dict[str, mmap.mmap] = {}
        self._fetch = ""

    # --- coming in ----------------------------------------------------------------------------------------------------

    def fetching(self) -> ReceivedObjects:
        """The same for one object that this process has asked for; others may push it, or fetch it too, meanwhile.

        A commit that comes so replaces nothing yet: whoever fetches it knows when it does.
        """
        shelf = copy.copy(self)
        shelf._fetch = f"{secrets.token_hex(4)}:"
        return shelf

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`. Raises: ValueError if it is no object of a container that is known here."""
        name, container = self._place(object_id)
        if name.file == COMMIT_FILE:
            with self._lock:
                memory = self._commits[self._fetch + object_id] = _room_for_commit(object_id, size_bytes)
            return memoryview(memory)
        slots = container.received
        if not slots.is_warm(size_bytes):
            container.tidy()  # who saves does this too, but in another process it cannot free the slots of this one
        return slots.take(self._fetch + object_id, size_bytes)

    def received(self, object_id: str, digest: str) -> None:
        """See `ReplicaStore`; a commit is checked and completes its step, a shard gets its name.

        Raises:
            CorruptCheckpointError: what was received is no commit, or no whole shard.
            CheckpointError: it cannot be published.
        """
        name, container = self._place(object_id)
        if name.file == COMMIT_FILE:
            with self._lock:
                memory = self._commits.pop(self._fetch + object_id)
            commit = _commit_in(memory, name)
            container.write_commit(commit, by_all=bool(self._fetch))
            if not self._fetch:
                container.tidy()
            return
        container.received.publish(self._fetch + object_id, container.folder_of(name.step) / name.file, digest)

    def abandon(self, object_id: str) -> None:
        """See `ReplicaStore`."""
        name, container = self._place(object_id)
        if name.file == COMMIT_FILE:
            with self._lock:
                self._commits.pop(self._fetch + object_id, None)
        else:
            container.received.abandon(self._fetch + object_id)

    # --- going out ----------------------------------------------------------------------------------------------------

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaStore`; None also for what can be no object here."""
        try:
            name, container = self._place(object_id)
        except ValueError:
            return None
        return sealed_bytes(container.folder_of(name.step) / name.file)

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaStore`; None for a commit, which may be that of another save of the same step."""
        try:
            name, container = self._place(object_id)
        except ValueError:
            return None
        if name.file == COMMIT_FILE:
            return None
        return container.received.digest_at(container.folder_of(name.step) / name.file)

    def ids(self) -> list[str]:
        """See `ReplicaStore`."""
        found = []
        for container in filter(None, map(self._find, self._names())):
            for one in container.entries():
                found += [str(ObjectName(container.name, one.name.step, file)) for file in objects_of(one)]
        return sorted(found)

    def close(self) -> None:
        """Gives the memory of what is on its way back."""
        with self._lock:
            self._commits.clear()

    def _place(self, object_id: str) -> tuple[ObjectName, Container]:
        name = ObjectName.parse(object_id)
        container = self._find(name.container)
        if container is None:
            raise ValueError(
                f"no container named {name.container!r} is in use here: all ranks have to use containers whose paths "
                "end with the same name"
            )
        return name, container


def verify_received(view: memoryview, object_id: str) -> None:
    """Compares every tensor of a shard in memory with its checksum, and its header with the name.

    Raises:
        CorruptCheckpointError: it is damaged, or another shard.
    """
    where, name = f"the copy of {object_id}", ObjectName.parse(object_id)
    header, _ = tensors_of(torch.frombuffer(view, dtype=torch.uint8), where)
    shard = find_shard(name.file)
    if shard is None:
        raise ValueError(f"{name} is no shard")
    require_shard(shard, header.meta, where)


def _room_for_commit(object_id: str, size_bytes: int) -> mmap.mmap:
    if not 0 < size_bytes <= MOST_COMMIT_BYTES:
        raise ValueError(f"{object_id} has {size_bytes} bytes: a commit has 1 to {MOST_COMMIT_BYTES}")
    return mmap.mmap(-1, size_bytes)


def _commit_in(memory: mmap.mmap, name: ObjectName) -> Commit:
    """The commit that was received. Raises: CorruptCheckpointError if it is none, or that of another step."""
    header, tensors = tensors_of(torch.frombuffer(memory, dtype=torch.uint8), f"the copy of {name}")
    commit = commit_from(header.meta, unflatten(header.structure, tensors))
    if commit.step != name.step:
        raise CorruptCheckpointError(f"what was received as {name} is the commit of step {commit.step}")
    return commit
