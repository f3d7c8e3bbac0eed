"""Frames on a TCP connection between two hosts: small JSON messages, and chunks of an object. No pickle, no copies.

A frame is a header (two fixed letters, kind, length, check, and a check of all these) and its content. The check of a
message is the XXH3 of its content, that of a chunk the running digest of the object (see `IncomingObject`). Lengths are
bounded before anything is read or reserved. Each frame has to pass within the connection's time limit.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from typing import NoReturn

import xxhash

from torchelastic.checkpoint.replication.errors import (
    AuthenticationError,
    CorruptReplicaError,
    DamagedFrameError,
    NoReplicasAvailableError,
    OutdatedRoundError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
    ReplicaBusyError,
    ReplicaRefusedError,
    ReplicationError,
)

PROTOCOL = "torchelastic-replica/2"
MOST_MESSAGE_BYTES = 64 << 10
MOST_CHUNK_BYTES = 4 << 20
#: Two chunks of this size fit into a core's second-level cache: the digest costs next to nothing there.
CHUNK_BYTES = 1 << 20

Message = dict[str, object]

_LAST_WORD_S = 1.0
_HEADER = struct.Struct("!2sBxIQ")
_HEADER_CHECK = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _HEADER_CHECK.size
_MAGIC = b"tR"
MESSAGE, CHUNK = 1, 2
_LIMITS = {MESSAGE: MOST_MESSAGE_BYTES, CHUNK: MOST_CHUNK_BYTES}

_ID = re.compile(r"[\w.:=@+,-]{1,128}(?:/[\w.:=@+,-]{1,128}){0,7}", re.ASCII)

#: What an error is called on the wire.
_KINDS: dict[str, type[ReplicationError]] = {
    "authentication": AuthenticationError,
    "busy": ReplicaBusyError,
    "changed": DamagedFrameError,
    "damaged": CorruptReplicaError,
    "fenced": OutdatedRoundError,
    "missing": NoReplicasAvailableError,
    "protocol": ProtocolError,
    "refused": ReplicaRefusedError,
}


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


def encode_header(kind: int, length_bytes: int, check: int) -> bytes:
    """The bytes before a frame's content."""
    header = _HEADER.pack(_MAGIC, kind, length_bytes, check)
    return header + _HEADER_CHECK.pack(xxhash.xxh32_intdigest(header))


def decode_header(data: bytes | bytearray, *, most_bytes: int | None = None) -> tuple[int, int, int]:
    """Reads a header: kind, length in bytes, check.

    Args:
        data: `HEADER_BYTES` bytes.
        most_bytes: what a content may have, if that is less than the kind allows.

    Raises:
        ProtocolError: it is none, or the content would be too large.
        DamagedFrameError: it was changed on its way.
    """
    magic, kind, length_bytes, check = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("does not speak this protocol")
    if _HEADER_CHECK.unpack_from(data, _HEADER.size)[0] != xxhash.xxh32_intdigest(data[: _HEADER.size]):
        raise DamagedFrameError("sent a header that was changed on its way")
    if kind not in _LIMITS:
        raise ProtocolError("sent a kind of frame that this release does not know")
    limit = _LIMITS[kind] if most_bytes is None else min(_LIMITS[kind], most_bytes)
    if length_bytes > limit:
        raise ProtocolError(f"announced a frame of {length_bytes} bytes, {limit} are allowed")
    return kind, length_bytes, check


def encode_message(message: Message) -> bytes:
    """A message as a whole frame."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; {MOST_MESSAGE_BYTES} are allowed")
    return encode_header(MESSAGE, len(content), xxhash.xxh3_64_intdigest(content)) + content


def decode_message(content: bytes | bytearray, check: int) -> Message:
    """Reads a message's content.

    Raises:
        DamagedFrameError: it was changed on its way.
        ProtocolError: it is no JSON object.
    """
    if xxhash.xxh3_64_intdigest(content) != check:
        raise DamagedFrameError("sent a message that was changed on its way")
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("sent a message that is no JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("sent a message that is no JSON object")
    return message


def text_in(message: Message, key: str) -> str:
    """A text of a message; raises `ProtocolError` if it is none."""
    value = message.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"sent no text as {key!r}")
    return value


def number_in(message: Message, key: str) -> int:
    """A whole number from 0 to 2**63 - 1; raises `ProtocolError` if it is none."""
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ProtocolError(f"sent no whole number as {key!r}")
    return value


def error_message(error: ReplicationError) -> Message:
    """What a peer is told of an error."""
    kind = next((kind for kind, type_ in _KINDS.items() if type_ is type(error)), "refused")
    return {"error": kind, "message": str(error)[:2000]}


class Connection:
    """One end of a TCP connection; not for several threads at once, `cut` excepted.

    Args:
        connected: the socket; the connection owns it from now on.
        peer: who is at the other end, for people.
        timeout_s: how long one frame may take.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_to(timeout_s)

    def limit_to(self, timeout_s: float) -> None:
        """How long one frame may take from now on.

        The kernel keeps the time: a whole chunk is then one call, and the interpreter's lock is asked for once.
        """
        self._timeout_s = timeout_s
        self._socket.settimeout(None)
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, max(1, int((timeout_s - seconds) * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Message) -> None:
        """Sends a message."""
        self._send(encode_message(message))

    def send_last(self, message: Message) -> None:
        """Sends a message to a peer that may be in the middle of sending, and waits a second for it to read that.

        Closed with something unread in it, a connection is reset, and a reset overtakes what was said last.
        """
        self.send(message)
        self.limit_to(min(self._timeout_s, _LAST_WORD_S))
        start_s = time.monotonic()
        scratch = bytearray(1 << 18)
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv_into(scratch) and time.monotonic() - start_s < _LAST_WORD_S:
                pass
        except OSError:
            pass  # it is gone, or it goes on sending: then it shall be reset

    def send_chunk(self, chunk: memoryview, running_digest: int) -> None:
        """Sends a chunk of an object, straight from where it lies."""
        self._send(encode_header(CHUNK, chunk.nbytes, running_digest), chunk)

    def receive(self, *, most_bytes: int | None = None) -> Message:
        """Waits for a message.

        Raises:
            ReplicationError: what the peer reports, in the class that it names; or the connection's own failure.
        """
        kind, length_bytes, check = self._receive_header(most_bytes)
        if kind != MESSAGE:
            raise ProtocolError(f"{self.peer} sent data where an answer was due")
        return self._receive_message(length_bytes, check)

    def receive_chunk_header(self) -> tuple[int, int]:
        """Waits for the next chunk: its length in bytes and its running digest; `fill` takes the content.

        Raises:
            ReplicationError: the peer reports one instead; or the connection's own failure.
        """
        kind, length_bytes, check = self._receive_header(None)
        if kind == MESSAGE:
            self._receive_message(length_bytes, check)
            raise ProtocolError(f"{self.peer} stopped in the middle of an object")
        return length_bytes, check

    def fill(self, buffer: memoryview | bytearray) -> None:
        """Receives as many bytes as the buffer has, straight into it."""
        view, filled, start_s = memoryview(buffer), 0, time.monotonic()
        while filled < view.nbytes:
            try:
                count = self._socket.recv_into(view[filled:], view.nbytes - filled, socket.MSG_WAITALL)
            except BlockingIOError:
                self._stalled(f"{view.nbytes - filled} of {view.nbytes} bytes were missing")
            except OSError as error:
                raise PeerLostError(f"lost {self.peer}: {error.strerror or error}") from error
            if count == 0:
                raise PeerLostError(f"lost {self.peer}: it closed the connection")
            filled += count
            if filled < view.nbytes and time.monotonic() - start_s > self._timeout_s:
                self._stalled(f"{view.nbytes - filled} of {view.nbytes} bytes were missing")

    def raise_complaint(self) -> None:
        """Raises what the peer has to say in the middle of an object, if it has said anything."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            pass  # the next call says the same
        self.receive()
        raise ProtocolError(f"{self.peer} sent a message in the middle of an object")

    def cut(self) -> None:
        """Ends both directions at once; who waits in another thread is woken. May be called from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _send(self, *parts: bytes | memoryview) -> None:
        rest = [memoryview(part) for part in parts]
        start_s = time.monotonic()
        while rest:
            try:
                count = self._socket.sendmsg(rest)
            except BlockingIOError:
                self._stalled(f"it did not take {sum(part.nbytes for part in rest)} bytes")
            except OSError as error:
                raise PeerLostError(f"lost {self.peer}: {error.strerror or error}") from error
            while rest and count >= rest[0].nbytes:
                count -= rest.pop(0).nbytes
            if rest:
                rest[0] = rest[0][count:]
                if time.monotonic() - start_s > self._timeout_s:
                    self._stalled(f"it did not take {sum(part.nbytes for part in rest)} bytes")

    def _receive_header(self, most_bytes: int | None) -> tuple[int, int, int]:
        header = bytearray(HEADER_BYTES)
        self.fill(header)
        try:
            return decode_header(header, most_bytes=most_bytes)
        except (DamagedFrameError, ProtocolError) as error:
            raise type(error)(f"{self.peer} {error}") from None

    def _receive_message(self, length_bytes: int, check: int) -> Message:
        content = bytearray(length_bytes)
        self.fill(content)
        try:
            message = decode_message(content, check)
        except (DamagedFrameError, ProtocolError) as error:
            raise type(error)(f"{self.peer} {error}") from None
        if "error" in message:
            reason = "".join(c for c in str(message.get("message")) if c.isprintable())[:2000]
            raise _KINDS.get(str(message["error"]), ReplicaRefusedError)(f"{self.peer}: {reason}")
        return message

    def _stalled(self, what: str) -> NoReturn:
        raise PeerStalledError(
            f"{self.peer} stalled: {what} after {self._timeout_s:g} s; its process is stopped or overloaded, or the "
            f"network to it is cut"
        )
