"""An object on its way in: where its bytes go, and how far they are verified. No socket, no log."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from torchelastic.checkpoint.replication.errors import CorruptReplicaError, DamagedFrameError, ReplicaRefusedError


def digest_of(content: memoryview | bytearray | bytes) -> str:
    """The digest that identifies an object's content: XXH3 with 64 bits, as 16 hexadecimal digits.

    It finds accidents (a flipped bit, a torn or mixed-up object), not malice.
    """
    return xxhash.xxh3_64_hexdigest(content)


class IncomingObject:
    """The receiving end of one object. It outlives connections: what breaks off is sent again from the beginning.

    Each chunk comes with the digest of the whole object up to its end, so one pass over the bytes checks each chunk,
    its place, and in the end the object.

    Args:
        object_id: its name.
        destination: called once with the size in bytes as soon as that is known; returns a writable, contiguous buffer
            of that size. It may raise to refuse.
        expected_digest: the only digest that is accepted, if it is known from elsewhere.
    """

    def __init__(
        self, object_id: str, destination: Callable[[int], memoryview | bytearray], *, expected_digest: str = ""
    ) -> None:
        self.object_id = object_id
        #: how many bytes it has; -1 until that is known
        self.size_bytes = -1
        #: `digest_of` the whole object; empty until that is known
        self.digest = ""
        #: how many bytes from the start on are known to be right
        self.verified_bytes = 0
        self._destination, self._expected_digest = destination, expected_digest
        self._view = memoryview(b"")
        self._running = xxhash.xxh3_64()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here and right."""
        return self.verified_bytes == self.size_bytes and self._running.hexdigest() == self.digest

    def announce(self, size_bytes: int, digest: str) -> None:
        """Says what is coming, from its beginning on; what is here counts no more.

        Raises:
            CorruptReplicaError: it is not the one that is expected.
            ReplicaRefusedError: an object of another size came before, or the destination has another size.
        """
        if self._expected_digest and digest != self._expected_digest:
            raise CorruptReplicaError(
                f"{self.object_id} has the digest {digest} there, and {self._expected_digest} is wanted; take another "
                f"replica"
            )
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
