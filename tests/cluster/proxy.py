"""A TCP proxy of the test's own in front of etcd: cuts, and loses or holds back exactly what a test chooses."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

from tests.waiting import wait_until

PATIENCE_S = 60.0
#: So much of what a client has sent lately is looked at for the request in question.
REMEMBERED_BYTES = 65536

IsIt = Callable[[bytes], bool]


class Proxy:
    """Forwards TCP connections from a port of its own.

    gRPC sends requests uncompressed, so a request is recognized by the bytes in it: keys and values of etcd.

    Args:
        target: (host, port) of etcd.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.connections: list[Connection] = []
        self._target = target
        self._lock = threading.Lock()  # guards the next one and `connections`
        self._chosen: tuple[IsIt, str] | None = None
        self._held: list[Connection] = []
        self.found = threading.Event()
        self._is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else its thread waits in accept(), and the port stays open with it
        self._listener.close()
        self.cut()

    # --- verbs --------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset all connections, and every new one at once, until `heal`."""
        self._is_cut = True
        self.reset()

    def heal(self) -> None:
        """Forward new connections again."""
        self._is_cut = False

    def reset(self) -> None:
        """Reset all connections; new ones are served."""
        with self._lock:
            connections, self.connections = self.connections, []
        for connection in connections:
            connection.reset()

    def lose_answer_of(self, is_it: IsIt) -> None:
        """The next request that `is_it` recognizes reaches etcd; nothing comes back on its connection any more.

        `found` is set when it was seen.
        """
        self._choose(is_it, "lose answer")

    def hold(self, is_it: IsIt) -> None:
        """The next request that `is_it` recognizes does not reach etcd before `deliver`, not even if its client goes.

        `found` is set when it was seen.
        """
        self._choose(is_it, "hold")

    def deliver(self) -> bytes:
        """Let etcd have what was held back, late; returns etcd's answer to it, which nobody else gets."""
        (connection,) = self._held
        self._held = []
        return connection.deliver()

    @property
    def is_waiting(self) -> bool:
        """Whether the request that was chosen last has not come yet."""
        return self._chosen is not None

    def _choose(self, is_it: IsIt, what: str) -> None:
        self.found.clear()
        with self._lock:
            self._chosen = (is_it, what)

    # --- forwarding ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._is_cut:
                    raise ConnectionRefusedError
                connection = Connection(self, client, socket.create_connection(self._target))
            except OSError:
                _reset(client)
                continue
            with self._lock:
                self.connections.append(connection)
            connection.start()

    def strike(self, connection: Connection) -> str | None:
        """What is to be done with a connection that has just sent something."""
        with self._lock:
            if self._chosen is None or not self._chosen[0](connection.sent):
                return None
            (_, what), self._chosen = self._chosen, None
        if what == "hold":
            self._held.append(connection)
        return what


class Connection:
    """One connection of a client to etcd, by way of the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.sent = b""
        self.held_back = b""
        self._proxy, self._client, self._server = proxy, client, server
        self._answers_are_lost = False
        self._late_answer = b""

    def start(self) -> None:
        """Forward in both directions."""
        threading.Thread(target=self._forward_requests, daemon=True).start()
        threading.Thread(target=self._forward_answers, daemon=True).start()

    def reset(self) -> None:
        """Reset the client's side; etcd's too, unless something is held back for it."""
        _reset(self._client)
        if not self.held_back:
            _reset(self._server)

    def deliver(self) -> bytes:
        """See `Proxy.deliver`."""
        late, self.held_back = self.held_back, b""
        self._server.sendall(late)
        wait_until(lambda: _has_data(self._late_answer), PATIENCE_S, "etcd answers what came late")
        _reset(self._server)
        return self._late_answer

    def _forward_requests(self) -> None:
        while data := _receive(self._client):
            self.sent = (self.sent + data)[-REMEMBERED_BYTES:]
            if self.held_back:
                self.held_back += data
                continue
            what = self._proxy.strike(self)
            self._answers_are_lost |= what is not None
            if what == "hold":
                self.held_back = data
            else:
                try:
                    self._server.sendall(data)
                except OSError:
                    break
            if what is not None:
                self._proxy.found.set()
        if not self.held_back:
            _reset(self._server)

    def _forward_answers(self) -> None:
        while data := _receive(self._server):
            if self._answers_are_lost:
                self._late_answer += b"" if self.held_back else data
                continue
            try:
                self._client.sendall(data)
            except OSError:
                break
        _reset(self._client)


def _has_data(frames: bytes) -> bool:
    """Whether a DATA frame of HTTP/2, gRPC's answer, is among these (RFC 9113, sections 4.1 and 6.1)."""
    while len(frames) >= 9:
        if frames[3] == 0:
            return True
        frames = frames[9 + int.from_bytes(frames[:3], "big") :]
    return False


def _receive(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except OSError:
        return b""


def _reset(one: socket.socket) -> None:
    """Close at once and say so: the other end sees ECONNRESET."""
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
    except OSError:
        pass
    one.close()
