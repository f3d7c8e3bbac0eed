"""What travels on a TCP connection between two hosts: proofs of the token, small JSON messages, the bytes of an object.

No pickle, and no copies.

A message is a header (two fixed letters, length and XXH3 of the content, and a check of all these) and JSON. Its length
is bounded before anything is read or reserved. The bytes of an object follow each other without anything between, since
both ends know by then how many they are; what breaks off or was changed is sent again as a whole. Each message, and
each `PIECE_BYTES` of an object, has to pass within the connection's time limit.

Both ends prove to each other that they know the token, which itself never travels and is never logged: a challenge and
response with HMAC-SHA256 over two fresh random numbers and the prover's role, so that neither an old answer nor the
other end's own answer is of any use. It keeps strangers out; what follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import struct
import time
from typing import NoReturn

import xxhash

from torchelastic.checkpoint.replicas.replication_errors import (
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

PROTOCOL = "torchelastic-replica/4"
MOST_MESSAGE_BYTES = 64 << 10
#: So much of an object is one system call. Two pieces of this size fit into a core's second-level cache: the digest
#: costs next to nothing there.
PIECE_BYTES = 1 << 20
#: Strangers may make us read no more than this.
MOST_GREETING_BYTES = 1024
LEAST_TOKEN_CHARACTERS = 16

Message = dict[str, object]

_HEADER = struct.Struct("!2sxxIQ")
_HEADER_CHECK = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _HEADER_CHECK.size
_MAGIC = b"tR"

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


def encode_header(length_bytes: int, check: int) -> bytes:
    """The bytes before a message's content."""
    header = _HEADER.pack(_MAGIC, length_bytes, check)
    return header + _HEADER_CHECK.pack(xxhash.xxh32_intdigest(header))


def decode_header(data: bytes | bytearray, *, most_bytes: int = MOST_MESSAGE_BYTES) -> tuple[int, int]:
    """Reads a header: length in bytes, check.

    Args:
        data: `HEADER_BYTES` bytes.
        most_bytes: what a content may have.

    Raises:
        ProtocolError: it is none, or the content would be too large.
        DamagedFrameError: it was changed on its way.
    """
    magic, length_bytes, check = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("does not speak this protocol")
    if _HEADER_CHECK.unpack_from(data, _HEADER.size)[0] != xxhash.xxh32_intdigest(data[: _HEADER.size]):
        raise DamagedFrameError("sent a header that was changed on its way")
    if length_bytes > most_bytes:
        raise ProtocolError(f"announced a message of {length_bytes} bytes, {most_bytes} are allowed")
    return length_bytes, check


def encode_message(message: Message) -> bytes:
    """A message with its header."""
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; {MOST_MESSAGE_BYTES} are allowed")
    return encode_header(len(content), xxhash.xxh3_64_intdigest(content)) + content


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
    """The message by which a peer learns of an error."""
    kind = next((kind for kind, type_ in _KINDS.items() if type_ is type(error)), "refused")
    return {"error": kind, "message": str(error)[:2000]}


class ReplicaConnection:
    """One end of a TCP connection; not for several threads at once, `cut` excepted.

    Args:
        connected: the socket; the connection owns it from now on.
        peer: who is at the other end, for people.
        timeout_s: how long one message, or one piece of an object, may take.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_to(timeout_s)

    def limit_to(self, timeout_s: float) -> None:
        """How long one message, or one piece of an object, may take from now on.

        The kernel keeps the time: a whole piece is then one call, and the interpreter's lock is asked for once.
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

    def receive(self, *, most_bytes: int = MOST_MESSAGE_BYTES) -> Message:
        """Waits for a message.

        Raises:
            ReplicationError: what the peer reports, in the class that it names; or the connection's own failure.
        """
        header = bytearray(HEADER_BYTES)
        self.fill(header)
        try:
            length_bytes, check = decode_header(header, most_bytes=most_bytes)
            content = bytearray(length_bytes)
            self.fill(content)
            message = decode_message(content, check)
        except (DamagedFrameError, ProtocolError) as error:
            raise type(error)(f"{self.peer} {error}") from None
        if "error" in message:
            reason = "".join(c for c in str(message.get("message")) if c.isprintable())[:2000]
            raise _KINDS.get(str(message["error"]), ReplicaRefusedError)(f"{self.peer}: {reason}")
        return message

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

    def send_bytes(self, content: memoryview, digest: xxhash.xxh3_64 | None = None) -> None:
        """Sends an object, piece by piece, straight from where it lies.

        Args:
            content: the whole object.
            digest: is updated with what is sent.
        """
        for start in range(0, content.nbytes, PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            if digest is not None:
                digest.update(piece)
            self._send(piece)

    def receive_bytes(self, into: memoryview) -> str:
        """Receives an object, straight into its destination, and returns the digest of what has arrived."""
        digest = xxhash.xxh3_64()
        for start in range(0, into.nbytes, PIECE_BYTES):
            piece = into[start : start + PIECE_BYTES]
            self.fill(piece)
            digest.update(piece)
        return digest.hexdigest()

    def cut(self) -> None:
        """Ends both directions at once; who waits in another thread is woken. May be called from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _send(self, content: bytes | memoryview) -> None:
        rest, start_s = memoryview(content), time.monotonic()
        while rest.nbytes:
            try:
                count = self._socket.send(rest)
            except BlockingIOError:
                self._stalled(f"it did not take {rest.nbytes} bytes")
            except OSError as error:
                raise PeerLostError(f"lost {self.peer}: {error.strerror or error}") from error
            rest = rest[count:]
            if rest.nbytes and time.monotonic() - start_s > self._timeout_s:
                self._stalled(f"it did not take {rest.nbytes} bytes")

    def _stalled(self, what: str) -> NoReturn:
        raise PeerStalledError(
            f"{self.peer} stalled: {what} after {self._timeout_s:g} s; its process is stopped or overloaded, or the "
            f"network to it is cut"
        )


def check_timeout(timeout_s: float) -> float:
    """Returns a time limit. Raises ValueError if it is none: every wait for a peer needs a bound."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; every wait for a peer needs a bound above 0")
    return timeout_s


def token_bytes(token: str) -> bytes:
    """The token as a key.

    Raises:
        ValueError: it is too short to be one.
    """
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise ValueError(
            f"the token has {len(token)} characters; at least {LEAST_TOKEN_CHARACTERS} are needed, of a random one "
            f"that all members share (secrets.token_hex(32))"
        )
    return token.encode()


def proof_of(token: bytes, role: str, server_nonce: str, client_nonce: str) -> str:
    """What only somebody who knows the token can answer to these two numbers in this role. Pure."""
    return hmac.new(token, "\n".join((PROTOCOL, role, server_nonce, client_nonce)).encode(), hashlib.sha256).hexdigest()


def greet_client(connection: ReplicaConnection, token: bytes) -> None:
    """The server's part.

    Raises:
        AuthenticationError: the client does not know the token; that was its answer.
        TransferError: it is silent, gone, or no client of ours.
    """
    server_nonce = secrets.token_hex(16)
    connection.send({"protocol": PROTOCOL, "nonce": server_nonce})
    answer = connection.receive(most_bytes=MOST_GREETING_BYTES)
    client_nonce = _nonce_in(answer)
    if not _is_equal(text_in(answer, "proof"), proof_of(token, "client", server_nonce, client_nonce)):
        error = AuthenticationError(
            "authentication failed: the client's token is not the one of this server; give both the token of their run"
        )
        connection.send(error_message(error))
        raise error
    connection.send({"proof": proof_of(token, "server", server_nonce, client_nonce)})


def greet_server(connection: ReplicaConnection, token: bytes) -> None:
    """The client's part.

    Raises:
        AuthenticationError: the server does not accept our token, or does not know it itself.
        TransferError: it is silent, gone, or no server of ours.
    """
    greeting = connection.receive(most_bytes=MOST_GREETING_BYTES)
    if greeting.get("protocol") != PROTOCOL:
        raise ProtocolError(f"{connection.peer} does not speak {PROTOCOL}; run the same release on all hosts")
    server_nonce, client_nonce = _nonce_in(greeting), secrets.token_hex(16)
    connection.send({"nonce": client_nonce, "proof": proof_of(token, "client", server_nonce, client_nonce)})
    # a refusal may be a few words longer than a proof
    answer = connection.receive(most_bytes=MOST_GREETING_BYTES)
    if not _is_equal(text_in(answer, "proof"), proof_of(token, "server", server_nonce, client_nonce)):
        raise AuthenticationError(f"{connection.peer} does not know this run's token: it is not one of our servers")


def _nonce_in(message: Message) -> str:
    nonce = text_in(message, "nonce")
    if not re.fullmatch(r"[0-9a-f]{32}", nonce):
        raise ProtocolError("sent no nonce of 32 hexadecimal digits")
    return nonce


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
