"""Where objects are received, and what a server takes from whom. No socket."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replicas.replication_errors import (
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


def writable(buffer: memoryview | bytearray, size_bytes: int, object_id: str) -> memoryview:
    """A destination as a row of bytes. Raises: ReplicaRefusedError if it is not what was asked for."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous or view.nbytes != size_bytes:
        raise ReplicaRefusedError(
            f"the destination of {object_id} has {view.nbytes} bytes{' and is read-only' if view.readonly else ''}; a "
            f"writable contiguous one of {size_bytes} bytes is needed"
        )
    return view.cast("B") if size_bytes else memoryview(bytearray())


class ReplicaStore(Protocol):
    """Receives, keeps and gives away whole objects, each under an id.

    A server calls all of it on its own threads, one call at a time, so calls must be quick: no waiting for a disk. What
    these methods raise is logged, and the peer's object is refused.
    """

    def destination(self, object_id: str, size_bytes: int, /) -> memoryview | bytearray:
        """Where an object is to be received: a writable contiguous buffer of `size_bytes` bytes (a warm slot, best).

        It belongs to the server until `received` or `abort` is called with the same id. What lies there under this id
        already must stay readable until then, or be gone.

        Raises:
            CheckpointError: there is no room now; the sender gets the answer "busy", and retries.
            ReplicationError: what is sent to the sender instead, such as `ReplicaRefusedError`.
            ValueError: this object is not wanted at all; the sender gets the reason.
        """

    def received(self, object_id: str, digest: str, /) -> None:
        """The object is complete and verified: from now on it may be shown in `ids` and given away.

        Args:
            object_id: the object.
            digest: its `digest_of`, to be returned by `digest`.
        """

    def abort(self, object_id: str, /) -> None:
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
    """Keeps objects in the memory of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytearray, str]] = {}
        self._incoming: dict[str, bytearray] = {}

    def destination(self, object_id: str, size_bytes: int) -> bytearray:
        """See `ReplicaStore`."""
        with self._lock:
            self._incoming[object_id] = bytearray(size_bytes)
            return self._incoming[object_id]

    def received(self, object_id: str, digest: str) -> None:
        """See `ReplicaStore`; replaces what was there under this id."""
        with self._lock:
            self._objects[object_id] = (self._incoming.pop(object_id), digest)

    def abort(self, object_id: str) -> None:
        """See `ReplicaStore`."""
        with self._lock:
            self._incoming.pop(object_id, None)

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaStore`; also for whoever wants to read what was received."""
        with self._lock:
            return memoryview(self._objects[object_id][0]) if object_id in self._objects else None

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaStore`."""
        with self._lock:
            return self._objects[object_id][1] if object_id in self._objects else None

    def ids(self) -> list[str]:
        """See `ReplicaStore`."""
        with self._lock:
            return sorted(self._objects)


class Reception:
    """Bounds what is on its way in. All calls may come from any thread.

    Args:
        shelf: where objects go; called by one thread at a time.
        most_objects: how many may be on their way at once.
    """

    def __init__(self, shelf: ReplicaStore, *, most_objects: int) -> None:
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

    def begin(self, object_id: str, size_bytes: int, digest: str, round_number: int) -> memoryview | None:
        """Makes room for an object.

        Returns:
            Where it goes; None if it is here already with this content. After it, exactly one of `complete` and
            `abort` has to be called.

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
            place = self._reserve(object_id, size_bytes)
            self._active.add(object_id)
            return place

    def complete(self, object_id: str, digest: str, arrived: str, round_number: int) -> None:
        """Publishes an object after a last look at its digest and at the fence; else it is abandoned.

        Args:
            object_id: its name.
            digest: that was announced.
            arrived: the digest of what is there.
            round_number: of who sent it.

        Raises:
            OutdatedRoundError: a newer round has begun meanwhile.
            DamagedFrameError: it is not what was announced.
        """
        with self.lock:
            try:
                self._check_round(object_id, round_number)
                if arrived != digest:
                    raise DamagedFrameError(f"{object_id} was changed on its way, or while it was sent")
            except ReplicationError:
                self.abort(object_id)
                raise
            self._active.remove(object_id)
            self._shelf.received(object_id, digest)

    def abort(self, object_id: str) -> None:
        """Gives the destination back to its owner."""
        with self.lock:
            self._active.remove(object_id)
            log.info("aborted %s", object_id)
            self._shelf.abort(object_id)

    def _check_round(self, object_id: str, round_number: int) -> None:
        if round_number < self.round:
            raise OutdatedRoundError(
                f"{object_id} comes from round {round_number}, and round {self.round} has begun: its sender was "
                f"replaced and must stop"
            )

    def _reserve(self, object_id: str, size_bytes: int) -> memoryview:
        try:
            buffer = self._shelf.destination(object_id, size_bytes)
        except ValueError as error:
            raise ReplicaRefusedError(str(error)) from error
        except ReplicationError:
            raise
        except CheckpointError as error:
            raise ReplicaBusyError(str(error)) from error
        try:
            return writable(buffer, size_bytes, object_id)
        except ReplicationError:
            self._shelf.abort(object_id)
            raise
