"""What the tests of replica transfers share: content, shelves to look into, processes, and a bad network."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

from torchelastic.checkpoint.replicas import protocol
from torchelastic.checkpoint.replicas.protocol import ReplicaConnection
from torchelastic.checkpoint.replicas.receive import MemoryShelf
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer

TOKEN = "the secret of this run, shared by all"
PATIENCE_S = 60.0
SIZE_BYTES = 3_000_001
#: What the tests have sent at once, so that there is a middle of an object.
SMALL_PIECE_BYTES = 65536


def content_of(seed: int, size_bytes: int = SIZE_BYTES) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


class RecordingShelf(MemoryShelf):
    """A shelf that tells the test what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.abandoned: list[str] = []
        self.places: dict[str, bytearray] = {}

    def destination(self, object_id: str, size_bytes: int) -> bytearray:
        self.places[object_id] = super().destination(object_id, size_bytes)
        return self.places[object_id]

    def abort(self, object_id: str) -> None:
        super().abort(object_id)
        self.abandoned.append(object_id)

    def put(self, object_id: str, content: bytes, digest: str) -> None:
        super().destination(object_id, len(content))[:] = content
        self.received(object_id, digest)

    def bytes_of(self, object_id: str) -> bytes:
        content = self.source(object_id)
        assert content is not None
        return bytes(content)


@contextmanager
def counting_pulls() -> Iterator[list[int]]:
    """The bytes of everything that this process fetches from other ranks meanwhile."""
    came: list[int] = []
    pull = ReplicaClient.pull

    def counted(*given: Any, **more: Any) -> Transferred:
        transferred = pull(*given, **more)
        came.append(transferred.size_bytes)
        return transferred

    with mock.patch.object(ReplicaClient, "pull", counted):
        yield came


class Wire:
    """A TCP proxy that counts and records what passes, and flips bits that a test names.

    Args:
        target: the server behind it.
        flips: positions in the stream, counted over all connections, at which one bit is turned.
        always: flip at the same positions of every connection instead.
        direction: "up" to the server, or "down" from it.
    """

    def __init__(
        self, target: tuple[str, int], flips: tuple[int, ...] = (), *, always: bool = False, direction: str = "up"
    ) -> None:
        self.seen = {"up": bytearray(), "down": bytearray()}
        self.connections = 0
        self._target, self._flips, self._always, self._direction = target, flips, always, direction
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            for source, sink, direction in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._forward, args=(source, sink, direction), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        passed = 0
        while data := _receive(source):
            start = passed if self._always else len(self.seen[direction])
            changed = bytearray(data)
            for position in self._flips if direction == self._direction else ():
                if start <= position < start + len(data):
                    changed[position - start] ^= 0x10
            passed += len(data)
            self.seen[direction] += data
            try:
                sink.sendall(changed)
            except OSError:
                break
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _receive(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except OSError:
        return b""


def client_of(server: ReplicaServer | Wire, token: str = TOKEN, retry_s: float = 5.0) -> ReplicaClient:
    return ReplicaClient(server.address, token, retry_s=retry_s, timeout_s=5.0)


@contextmanager
def between_pieces(call: Callable[[], object]) -> Iterator[None]:
    """Calls something before every piece of an object but the first, whoever in this process sends it."""
    send = ReplicaConnection._send
    begun: set[ReplicaConnection] = set()

    def call_and_send(connection: ReplicaConnection, content: bytes | memoryview) -> None:
        if isinstance(content, memoryview):
            if connection in begun:
                call()
            begun.add(connection)
        send(connection, content)

    with (
        mock.patch.object(protocol, "PIECE_BYTES", SMALL_PIECE_BYTES),
        mock.patch.object(ReplicaConnection, "_send", call_and_send),
    ):
        yield


PREAMBLE = """
import sys, time
from torchelastic.checkpoint.replicas import protocol
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replicas.receive import MemoryShelf, digest_of
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from tests.process.replicas import SIZE_BYTES, TOKEN, RecordingShelf, between_pieces, content_of
"""

PUSHES_SLOWLY = """
client = ReplicaClient(("127.0.0.1", int(sys.argv[1])), TOKEN)
with between_pieces(lambda: time.sleep(0.2)):
    client.push("x", content_of(1), token_round=1)
"""

SERVES_SLOWLY = """
shelf = RecordingShelf()
shelf.put("x", content_of(1), digest_of(content_of(1)))
with between_pieces(lambda: time.sleep(1)), ReplicaServer(shelf, TOKEN, host="127.0.0.1") as server:
    print(server.address[1], flush=True)
    sys.stdin.read()
"""


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PREAMBLE + program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(PATIENCE_S)
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
