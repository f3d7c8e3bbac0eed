"""What a server receives right now, and from whom it takes anything. No socket."""

from __future__ import annotations

import logging
import threading

from torchelastic.checkpoint.replication.errors import (
    OutdatedRoundError,
    ReplicaBusyError,
    ReplicaRefusedError,
    ReplicationError,
)
from torchelastic.checkpoint.replication.incoming import IncomingObject
from torchelastic.checkpoint.replication.shelf import ReplicaShelf

log = logging.getLogger(__name__)


class Reception:
    """Bounds what is on its way in. All calls may come from any thread.

    Args:
        shelf: where objects go; called by one thread at a time.
        most_objects: how many may be on their way at once.
        most_object_bytes: how large one may be.
    """

    def __init__(self, shelf: ReplicaShelf, *, most_objects: int, most_object_bytes: int) -> None:
        self.round = 0
        self._shelf = shelf
        self._most_objects, self._most_object_bytes = most_objects, most_object_bytes
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
            ReplicaRefusedError: too large, or the shelf does not want it.
        """
        with self.lock:
            self._check_round(object_id, round_number)
            if size_bytes > self._most_object_bytes:
                raise ReplicaRefusedError(
                    f"{object_id} has {size_bytes} bytes, and this server takes {self._most_object_bytes} at most; "
                    f"raise its max_object_bytes, or send smaller objects"
                )
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
        if buffer is None:
            raise ReplicaBusyError(f"there is no room for {object_id} ({size_bytes} bytes) now; try again later")
        given = buffer
        incoming = IncomingObject(object_id, lambda _: given)
        try:
            incoming.announce(size_bytes, digest)
        except ReplicationError:
            self._shelf.abandon(object_id)
            raise
        return incoming
