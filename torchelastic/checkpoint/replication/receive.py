"""Where objects are received, how far one on its way in is verified, and what a server takes from whom. No socket."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replication.errors import (
    CorruptReplicaError,
    DamagedFrameError,
    OutdatedRoundError,
    ReplicaBusyError,
    ReplicaRefusedError,
    ReplicationError,
)

log = logging.getLogger(__name__)

#: Called with the size of an object in bytes; returns where it is to be received.
Destination = Callable[[int], "memoryview | bytearray"]

_ID = re.compile(r"[\w.:=@+,-]{1,128}(?:/[\w.:=@+,-]{1,128}){0,7}", re.ASCII)


def check_object_id(object_id: str) -> str:
    """Returns an id that may travel: up to eight parts of letters, digits and ``_.:=@+,-`` between slashes.

    Raises:
        ValueError: it is none, or one of its parts is "." or "..".
    """
    if not _ID.fullmatch(object_id) or not {".", ".."}.isdisjoint(object_id.split("/")):
        raise ValueError(
            f"{object_id[:200]!r} is no id of an object; use up to eight parts of at most 128 letters, digits and "
            f"_.:=@+,- with slashes between, none of them . or .."
        )
    return object_id


def digest_of(content: memoryview | bytearray | bytes) -> str:
    """The digest that identifies an object's content: XXH3 with 64 bits, as 16 hexadecimal digits.

    It finds accidents (a flipped bit, a torn or mixed-up object), not malice.
    """
    return xxhash.xxh3_64_hexdigest(content)


def running_digests(content: memoryview, chunk_bytes: int) -> list[int]:
    """The digest of the content up to the end of each chunk; the last one is the digest of the object."""
    running, digests = xxhash.xxh3_64(), []
    for offset in range(0, content.nbytes, chunk_bytes):
        running.update(content[offset : offset + chunk_bytes])
        digests.append(running.intdigest())
    return digests


class IncomingObject:
    """The receiving end of one object. It outlives connections: what breaks off is sent again from the beginning.

    Each chunk comes with the digest of the whole object up to its end, so one pass over the bytes checks each chunk,
    its place, and in the end the object.

    Args:
        object_id: its name.
        destination: called once with the size in bytes as soon as that is known; returns a writable, contiguous buffer
            of that size. It may raise to refuse.
    """

    def __init__(self, object_id: str, destination: Destination) -> None:
        self.object_id = object_id
        #: how many bytes it has; -1 until that is known
        self.size_bytes = -1
        #: `digest_of` the whole object; empty until that is known
        self.digest = ""
        #: how many bytes from the start on are known to be right
        self.verified_bytes = 0
        self._destination = destination
        self._view = memoryview(b"")
        self._running = xxhash.xxh3_64()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here and right."""
        return self.verified_bytes == self.size_bytes and self._running.hexdigest() == self.digest

    def announce(self, size_bytes: int, digest: str) -> None:
        """Says what is coming, from its beginning on; what is here counts no more.

        Raises:
            ReplicaRefusedError: an object of another size came before, or the destination has another size.
        """
        if self.size_bytes < 0:
            self._view = _writable(self._destination(size_bytes), size_bytes, self.object_id)
            self.size_bytes = size_bytes
        elif size_bytes != self.size_bytes:
            raise ReplicaRefusedError(
                f"{self.object_id} has {size_bytes} bytes here and {self.size_bytes} elsewhere; fetch it anew"
            )
        self.digest = digest
        self.verified_bytes = 0
        self._running = xxhash.xxh3_64()

    def place(self, length_bytes: int) -> memoryview:
        """Where the next chunk goes.

        Raises:
            ReplicaRefusedError: it would go beyond the announced size.
        """
        end = self.verified_bytes + length_bytes
        if length_bytes < 1 or end > self.size_bytes:
            raise ReplicaRefusedError(
                f"{self.object_id}: a chunk of {length_bytes} bytes at {self.verified_bytes} of {self.size_bytes}"
            )
        return self._view[self.verified_bytes : end]

    def accept(self, chunk: memoryview, running_digest: int) -> None:
        """Counts a chunk that lies at its place as received if it is right.

        Args:
            chunk: what `place` returned, filled.
            running_digest: the digest of the object from its start to the end of this chunk.

        Raises:
            DamagedFrameError: it is not what was sent; it may be sent again.
        """
        running = self._running.copy()
        running.update(chunk)
        if running.intdigest() != running_digest:
            raise DamagedFrameError(
                f"{self.object_id}: the {chunk.nbytes} bytes at {self.verified_bytes} of {self.size_bytes} are not "
                f"those that were sent"
            )
        self._running = running
        self.verified_bytes += chunk.nbytes

    def finish(self) -> None:
        """Compares the whole with its announced digest.

        Raises:
            CorruptReplicaError: it is incomplete, or it was damaged where it came from.
        """
        if self.is_complete:
            return
        raise CorruptReplicaError(
            f"{self.object_id} arrived as it was sent ({self.verified_bytes} of {self.size_bytes} bytes), and its "
            f"digest is {self._running.hexdigest()} where {self.digest} was announced: it is damaged where it came "
            f"from; take another replica"
        )

    def release(self) -> None:
        """Lets go of the destination, for whoever resizes or unmaps it."""
        self._view.release()


def _writable(buffer: memoryview | bytearray, size_bytes: int, object_id: str) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous or view.nbytes != size_bytes:
        raise ReplicaRefusedError(
            f"the destination of {object_id} has {view.nbytes} bytes{' and is read-only' if view.readonly else ''}; a "
            f"writable contiguous one of {size_bytes} bytes is needed"
        )
    return view.cast("B") if size_bytes else memoryview(bytearray())


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


class Reception:
    """Bounds what is on its way in. All calls may come from any thread.

    Args:
        shelf: where objects go; called by one thread at a time.
        most_objects: how many may be on their way at once.
    """

    def __init__(self, shelf: ReplicaShelf, *, most_objects: int) -> None:
        self.round = 0
        self._shelf = shelf
        self._most_objects = most_objects
        self.lock = threading.RLock()  # guards everything here and every call of the shelf
        self._active: set[str] = set()

    def fence(self, round_number: int) -> None:
        """Refuses pushes of older rounds from now on; a number lower than an earlier one changes nothing.

        When it returns, nothing that an older round pushed can become visible any more.
        """
        with self.lock:
            self.round = max(self.round, round_number)

    def begin(self, object_id: str, size_bytes: int, digest: str, round_number: int) -> IncomingObject | None:
        """Makes room for an object.

        Returns:
            Where it goes; None if it is here already with this content. After it, exactly one of `complete` and
            `abandon` has to be called with it.

        Raises:
            OutdatedRoundError: the round is older than the fence.
            ReplicaBusyError: no room now, or somebody is sending the same object.
            ReplicaRefusedError: the shelf does not want it.
        """
        with self.lock:
            self._check_round(object_id, round_number)
            if self._shelf.digest(object_id) == digest:
                return None
            if object_id in self._active:
                raise ReplicaBusyError(f"somebody is sending {object_id} already; try again later")
            if len(self._active) >= self._most_objects:
                raise ReplicaBusyError(f"{len(self._active)} objects are on their way already; try again later")
            incoming = self._reserve(object_id, size_bytes, digest)
            self._active.add(object_id)
            return incoming

    def complete(self, incoming: IncomingObject, round_number: int) -> None:
        """Publishes an object after a last look at its digest and at the fence.

        Raises:
            OutdatedRoundError: a newer round has begun meanwhile; the object is abandoned.
            CorruptReplicaError: it is not what was announced; the object is abandoned.
        """
        with self.lock:
            try:
                self._check_round(incoming.object_id, round_number)
                incoming.finish()
            except ReplicationError:
                self.abandon(incoming)
                raise
            self._active.remove(incoming.object_id)
            incoming.release()
            self._shelf.received(incoming.object_id, incoming.digest)

    def abandon(self, incoming: IncomingObject) -> None:
        """Gives the destination back to its owner."""
        with self.lock:
            self._active.remove(incoming.object_id)
            log.info("abandoned %s with %d bytes received", incoming.object_id, incoming.verified_bytes)
            incoming.release()
            self._shelf.abandon(incoming.object_id)

    def _check_round(self, object_id: str, round_number: int) -> None:
        if round_number < self.round:
            raise OutdatedRoundError(
                f"{object_id} comes from round {round_number}, and round {self.round} has begun: its sender was "
                f"replaced and must stop"
            )

    def _reserve(self, object_id: str, size_bytes: int, digest: str) -> IncomingObject:
        try:
            buffer = self._shelf.destination(object_id, size_bytes)
        except ValueError as error:
            raise ReplicaRefusedError(str(error)) from error
        except ReplicationError:
            raise
        except CheckpointError as error:
            raise ReplicaBusyError(str(error)) from error
        incoming = IncomingObject(object_id, lambda _: buffer)
        try:
            incoming.announce(size_bytes, digest)
        except ReplicationError:
            self._shelf.abandon(object_id)
            raise
        return incoming
