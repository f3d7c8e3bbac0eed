"""What is said of a port at which something else than etcd listens."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchelastic.rendezvous.credentials import NO_CREDENTIALS
from torchelastic.rendezvous.etcd_handshake import why_no_handshake
from torchelastic.rendezvous.server import EtcdServer


@contextmanager
def answering(words: bytes) -> Iterator[int]:
    """A server that says these words to everybody, and ends the connection."""

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(1000)
                client.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def why(port: int) -> str | None:
    return why_no_handshake("127.0.0.1", port, NO_CREDENTIALS, 5.0)


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_port_of_something_else_is_named_as_such(words: bytes) -> None:
    with answering(words) as port:
        said = why(port)
    assert said is not None
    assert said.startswith(f"etcd at 127.0.0.1:{port} does not speak as etcd does: another program listens there; give")


def test_a_web_server_is_none_either() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert "does not speak" in (why(server.server_address[1]) or "")
        server.shutdown()


def test_of_an_etcd_and_of_a_port_that_only_hangs_up_nothing_is_said() -> None:
    with answering(b"") as port:
        assert why(port) is None
    with EtcdServer() as etcd:
        assert why(int(etcd.endpoint.rpartition(":")[2])) is None
