"""Where replicas lie: what the owner of the memory offers to a `ReplicaServer`, and a plain one in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torchelastic.checkpoint.errors import CheckpointError


class ReplicaShelf(Protocol):
    """Receives, keeps and gives away whole objects, each under an id.

    A server calls all of it on its own threads, one call at a time, so calls must be quick: no waiting for a disk. What
    these methods raise is logged, and the peer is told that the object is refused.
    """

    def destination(self, object_id: str, size_bytes: int, /) -> memoryview | bytearray:
        """Where an object is to be received: a writable contiguous buffer of `size_bytes` bytes (a warm slot, best).

        It belongs to the server until `received` or `abandon` is called with the same id. What lies there under this id
        already must stay readable until then, or be gone.

        Raises:
            CheckpointError: there is no room now; the sender is told that it is busy, and tries again.
            ReplicationError: what the sender is to be told instead, such as `ReplicaRefusedError`.
            ValueError: this object is not wanted at all; the sender is told why.
        """

    def received(self, object_id: str, digest: str, /) -> None:
        """The object is complete and verified: from now on it may be shown in `ids` and given away.

        Args:
            object_id: the object.
            digest: its `digest_of`, to be returned by `digest`.
        """

    def abandon(self, object_id: str, /) -> None:
        """The object will not be completed: its destination is the owner's again."""

    def source(self, object_id: str, /) -> memoryview | None:
        """The bytes of an object to be given away; None if it is not here.

        They are read until the peer has them. If they are overwritten meanwhile, the peer notices and discards them.
        """

    def digest(self, object_id: str, /) -> str | None:
        """The digest of an object that is here, as it was when it was received or written.

        None if the object is not here, or if nobody computed it: then it is computed anew whenever the object is sent.
        """

    def ids(self) -> Sequence[str]:
        """What is here and complete."""


class MemoryShelf:
    """Keeps objects in the memory of this process, as many as fit.

    Args:
        capacity_bytes: how much there may be in all, objects on their way included.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytearray, str]] = {}
        self._incoming: dict[str, bytearray] = {}

    def destination(self, object_id: str, size_bytes: int) -> bytearray:
        """See `ReplicaShelf`; there is no room now if the object does not fit beside the others."""
        if size_bytes > self._capacity_bytes:
            raise ValueError(f"{object_id} has {size_bytes} bytes, and this shelf holds {self._capacity_bytes} in all")
        with self._lock:
            used = sum(len(content) for content, _ in self._objects.values()) + sum(map(len, self._incoming.values()))
            if used + size_bytes > self._capacity_bytes:
                raise CheckpointError(f"there is no room for {object_id} ({size_bytes} bytes) now; try again later")
            self._incoming[object_id] = bytearray(size_bytes)
            return self._incoming[object_id]

    def received(self, object_id: str, digest: str) -> None:
        """See `ReplicaShelf`; replaces what was there under this id."""
        with self._lock:
            self._objects[object_id] = (self._incoming.pop(object_id), digest)

    def abandon(self, object_id: str) -> None:
        """See `ReplicaShelf`."""
        with self._lock:
            self._incoming.pop(object_id, None)

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaShelf`; also for whoever wants to read what was received."""
        with self._lock:
            return memoryview(self._objects[object_id][0]) if object_id in self._objects else None

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaShelf`."""
        with self._lock:
            return self._objects[object_id][1] if object_id in self._objects else None

    def ids(self) -> list[str]:
        """See `ReplicaShelf`."""
        with self._lock:
            return sorted(self._objects)

    def remove(self, object_id: str) -> None:
        """Forgets an object, if it is here."""
        with self._lock:
            self._objects.pop(object_id, None)
