"""The bytes of one object over a connection, chunk by chunk, from where they lie to where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from torchelastic.checkpoint.replication.errors import PeerLostError
from torchelastic.checkpoint.replication.incoming import IncomingObject
from torchelastic.checkpoint.replication.wire import CHUNK_BYTES, MOST_CHUNK_BYTES, Connection

_LEAST_CHUNK_BYTES = 4096


def check_limits(timeout_s: float, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Raises ValueError if a wait for a peer had no bound, or chunks were too small or too large for a frame."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; every wait for a peer needs a bound above 0")
    if not _LEAST_CHUNK_BYTES <= chunk_bytes <= MOST_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; choose {_LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES}")


def running_digests(content: memoryview, chunk_bytes: int) -> list[int]:
    """The digest of the content up to the end of each chunk; the last one is the digest of the object."""
    running, digests = xxhash.xxh3_64(), []
    for offset in range(0, content.nbytes, chunk_bytes):
        running.update(content[offset : offset + chunk_bytes])
        digests.append(running.intdigest())
    return digests


def send_chunks(
    connection: Connection, content: memoryview, chunk_bytes: int, digests: Sequence[int] | None = None
) -> None:
    """Sends an object.

    Args:
        connection: the receiver, ready for chunks.
        content: the whole object. If it is changed meanwhile, the receiver notices.
        chunk_bytes: how large the chunks are.
        digests: `running_digests` of the content, if they are known; that spares a pass over the bytes.

    Raises:
        ReplicationError: what the receiver complains about, or the connection's failure.
    """
    running = xxhash.xxh3_64()
    for number, start in enumerate(range(0, content.nbytes, chunk_bytes)):
        chunk = content[start : start + chunk_bytes]
        if digests is None:
            running.update(chunk)
        connection.raise_complaint()
        try:
            connection.send_chunk(chunk, running.intdigest() if digests is None else digests[number])
        except PeerLostError:
            connection.raise_complaint()  # its last word says more than the broken connection
            raise


def receive_chunks(connection: Connection, incoming: IncomingObject) -> None:
    """Receives an announced object.

    Raises:
        ReplicationError: a chunk is damaged, the sender stops, or the connection fails.
    """
    while incoming.verified_bytes < incoming.size_bytes:
        length_bytes, running_digest = connection.receive_chunk_header()
        chunk = incoming.place(length_bytes)
        connection.fill(chunk)
        incoming.accept(chunk, running_digest)
