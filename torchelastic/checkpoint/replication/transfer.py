"""The bytes of one object over a connection, chunk by chunk, from where they lie to where they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from torchelastic.checkpoint.replication.errors import PeerLostError
from torchelastic.checkpoint.replication.incoming import IncomingObject
from torchelastic.checkpoint.replication.rate import TokenBucket
from torchelastic.checkpoint.replication.wire import CHUNK_BYTES, MOST_CHUNK_BYTES, Connection

_LEAST_CHUNK_BYTES = 4096


class Pace:
    """Keeps senders below a common rate; may be shared by threads.

    Args:
        bytes_per_s: the rate; None for as fast as the network goes.
        chunk_bytes: the chunks that are wanted. They are made smaller where one would take a quarter of the time limit.
        timeout_s: how long the receiver waits for a chunk.
        sharers: how many transfers may share the rate.
        clock: seconds that only go forward.
        sleep: waits for so many seconds.

    Raises:
        ValueError: the rate is so low that the receiver would take the sender for stalled, or a number makes no sense.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float,
        sharers: int = 1,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; every wait for a peer needs a bound above 0")
        if not _LEAST_CHUNK_BYTES <= chunk_bytes <= MOST_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; choose {_LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES}")
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._bucket: TokenBucket | None = None
        self.chunk_bytes = chunk_bytes
        if bytes_per_s is None:
            return
        self.chunk_bytes = min(chunk_bytes, int(bytes_per_s * timeout_s / (4 * sharers)))
        if self.chunk_bytes < _LEAST_CHUNK_BYTES:
            least = 4 * sharers * _LEAST_CHUNK_BYTES / timeout_s
            raise ValueError(
                f"with {bytes_per_s:g} bytes/s the receiver would take the sender for stalled; allow at least "
                f"{least:.0f} bytes/s, or a longer timeout_s"
            )
        self._bucket = TokenBucket.full(bytes_per_s, self.chunk_bytes, clock())

    def wait(self, size_bytes: int) -> None:
        """Returns when so many bytes may be sent."""
        if self._bucket is None:
            return
        with self._lock:
            self._bucket, delay_s = self._bucket.take(size_bytes, self._clock())
        if delay_s > 0:
            self._sleep(delay_s)


def running_digests(content: memoryview, chunk_bytes: int) -> list[int]:
    """The digest of the content up to the end of each chunk; the last one is the digest of the object."""
    running, digests = xxhash.xxh3_64(), []
    for offset in range(0, content.nbytes, chunk_bytes):
        running.update(content[offset : offset + chunk_bytes])
        digests.append(running.intdigest())
    return digests


def send_chunks(
    connection: Connection, content: memoryview, start: int, pace: Pace, digests: Sequence[int] | None = None
) -> None:
    """Sends an object from `start` on.

    Args:
        connection: the receiver, ready for chunks.
        content: the whole object. If it is changed meanwhile, the receiver notices.
        start: how many of its first bytes the receiver has verified.
        pace: how large the chunks are and how fast they may follow each other.
        digests: `running_digests` of the content, if they are known; that spares a pass over the bytes.

    Raises:
        ReplicationError: what the receiver complains about, or the connection's failure.
    """
    for chunk, running_digest in _pieces(content, start, pace.chunk_bytes, digests):
        pace.wait(chunk.nbytes)
        connection.raise_complaint()
        try:
            connection.send_chunk(chunk, running_digest)
        except PeerLostError:
            connection.raise_complaint()  # its last word says more than the broken connection
            raise


def _pieces(
    content: memoryview, start: int, chunk_bytes: int, digests: Sequence[int] | None
) -> Iterator[tuple[memoryview, int]]:
    """Chunks that end at multiples of their size, so that it does not matter where another sender stopped."""
    running = xxhash.xxh3_64() if digests else xxhash.xxh3_64(content[:start])
    while start < content.nbytes:
        number = start // chunk_bytes
        chunk = content[start : (number + 1) * chunk_bytes]
        if digests:
            yield chunk, digests[number]
        else:
            running.update(chunk)
            yield chunk, running.intdigest()
        start += chunk.nbytes


def receive_chunks(connection: Connection, incoming: IncomingObject) -> None:
    """Receives what is missing of an announced object.

    Raises:
        ReplicationError: a chunk is damaged, the sender stops, or the connection fails; `incoming` keeps what is
            verified.
    """
    while incoming.verified_bytes < incoming.size_bytes:
        length_bytes, running_digest = connection.receive_chunk_header()
        chunk = incoming.place(length_bytes)
        connection.fill(chunk)
        incoming.accept(chunk, running_digest)
