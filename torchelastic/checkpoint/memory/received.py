"""Objects of other hosts' checkpoints on their way into this host's containers, and what is given away from there."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.local.image import tensors_of
from torchelastic.checkpoint.memory.commit import Commit, commit_from
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.names import COMMIT_FILE, ObjectName, ShardName
from torchelastic.checkpoint.replication.slot_shelf import SlotShelf, sealed_bytes
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.tree import unflatten

#: A commit holds metadata and small extra files; nobody may fill this host's memory with one.
MOST_COMMIT_BYTES = 1 << 30


class ReceivedObjects:
    """A `ReplicaShelf` over containers; an object's id is the text of its `ObjectName`. May be used by several threads.

    Args:
        find: the container of a name; None if this process knows none.
        names: of all containers.
    """

    def __init__(self, find: Callable[[str], Container | None], names: Callable[[], Sequence[str]]) -> None:
        self._find = find
        self._names = names
        self._lock = threading.Lock()
        self._commits: dict[str, _CommitBuffer] = {}

    # --- coming in ----------------------------------------------------------------------------------------------------

    def destination(self, object_id: str, size_bytes: int) -> memoryview | None:
        """See `ReplicaShelf`. Raises: ValueError if it is no object of a container that is known here."""
        try:
            return self.take_room(object_id, size_bytes)
        except CheckpointError:
            return None

    def take_room(self, object_id: str, size_bytes: int, fetch: str = "") -> memoryview:
        """As `destination`; raises CheckpointError if there is no room, which says why.

        Args:
            object_id: the object.
            size_bytes: its size.
            fetch: tells transfers of the same object into this process apart; empty for what is pushed.
        """
        name, container = self._place(object_id)
        if name.file == COMMIT_FILE:
            self.abandon(object_id, fetch)
            commit = _CommitBuffer(object_id, size_bytes)
            with self._lock:
                self._commits[fetch + object_id] = commit
            return commit.view()
        slots = _slots_of(container)
        if not slots.is_warm(size_bytes):
            container.tidy()  # who saves does this too, but in another process it cannot free the slots of this one
        return slots.take(fetch + object_id, size_bytes)

    def received(self, object_id: str, digest: str, fetch: str = "") -> None:
        """See `ReplicaShelf`; a commit is checked and completes its step, a shard gets its name.

        Args:
            object_id: the object.
            digest: its `digest_of`.
            fetch: as given to `take_room`. A commit that was fetched is not settled: whoever fetched it knows when.

        Raises:
            CorruptCheckpointError: what was received is no commit, or no whole shard.
            CheckpointError: it cannot be published.
        """
        name, container = self._place(object_id)
        if name.file == COMMIT_FILE:
            with self._lock:
                buffer = self._commits.pop(fetch + object_id)
            with buffer:
                commit = buffer.read(name)
            container.write_commit(commit, is_settled=not fetch)
            if not fetch:
                container.tidy()
            return
        slots, path = _slots_of(container), container.folder_of(name.step) / name.file
        try:
            slots.publish(fetch + object_id, path, _shard_of(name).rank, digest)
        except BaseException:
            slots.abandon(fetch + object_id)
            raise

    def abandon(self, object_id: str, fetch: str = "") -> None:
        """See `ReplicaShelf`."""
        name, container = self._place(object_id)
        with self._lock:
            buffer = self._commits.pop(fetch + object_id, None)
        if buffer is not None:
            buffer.close()
        if name.file != COMMIT_FILE:
            _slots_of(container).abandon(fetch + object_id)

    # --- going out ----------------------------------------------------------------------------------------------------

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaShelf`; None also for what can be no object here."""
        try:
            name, container = self._place(object_id)
        except ValueError:
            return None
        if name.file == COMMIT_FILE:
            path = container.commit_path(name.step)
            return None if path is None else sealed_bytes(path, 0)
        return sealed_bytes(container.folder_of(name.step) / name.file, _shard_of(name).rank)

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaShelf`; None for a commit, which is taken again so that it counts as settled."""
        try:
            name, container = self._place(object_id)
        except ValueError:
            return None
        if name.file == COMMIT_FILE:
            return None
        return _slots_of(container).digest(container.folder_of(name.step) / name.file)

    def ids(self) -> list[str]:
        """See `ReplicaShelf`."""
        found = []
        for container in filter(None, map(self._find, self._names())):
            for step in container.steps():
                files = [*map(str, step.shards), *([COMMIT_FILE] if step.commit is not None else [])]
                found += [str(ObjectName(container.name, step.step, file)) for file in files]
        return sorted(found)

    def close(self) -> None:
        """Gives the memory of what is on its way back."""
        with self._lock:
            for buffer in self._commits.values():
                buffer.close()
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
    _shard_of(name).require_in(header.meta, name.step, where)


def _shard_of(name: ObjectName) -> ShardName:
    shard = ShardName.find(name.file)
    if shard is None:
        raise ValueError(f"{name} is no shard")
    return shard


def _slots_of(container: Container) -> SlotShelf:
    if not isinstance(container.received, SlotShelf):
        raise ValueError(f"the container {container.root} was not opened by a CheckpointObjectManager")
    return container.received


class _CommitBuffer:
    """A commit on its way, in a file without a name, so that it is read like any shard."""

    def __init__(self, object_id: str, size_bytes: int) -> None:
        if not 0 < size_bytes <= MOST_COMMIT_BYTES:
            raise ValueError(f"{object_id} has {size_bytes} bytes: a commit has 1 to {MOST_COMMIT_BYTES}")
        self._size_bytes = size_bytes
        self._descriptor = os.memfd_create("torchelastic-commit", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size_bytes)

    def view(self) -> memoryview:
        """All of it, writable."""
        return memoryview(mmap.mmap(self._descriptor, self._size_bytes))

    def read(self, name: ObjectName) -> Commit:
        """The commit. Raises: CorruptCheckpointError if it is none, or that of another step."""
        with ShardReader(f"/proc/self/fd/{self._descriptor}") as shard:
            commit = commit_from(shard.header.meta, unflatten(shard.header.structure, shard.read()))
        if commit.step != name.step:
            raise CorruptCheckpointError(f"what was received as {name} is the commit of step {commit.step}")
        return commit

    def close(self) -> None:
        """Gives the memory back as soon as nobody uses the view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> _CommitBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
