"""A process through which a replica server is reached, to be killed or stopped: a path to a host without that host."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.process.fork_server import fork_server, started

#: For a relay that does not kill itself.
UNBOUNDED = 1 << 62
_START_S = 120
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Relay:
    """A relay that runs.

    Attributes:
        port: where it listens, on 127.0.0.1.
        pid: of its process.
        process: the process.
    """

    port: int
    pid: int
    process: BaseProcess

    def was_killed(self) -> bool:
        """Whether it has ended by SIGKILL; waits for its end."""
        self.process.join(20)
        return self.process.exitcode == -signal.SIGKILL


@contextmanager
def relay_to(port_file: Path, dies_after_bytes: int = UNBOUNDED) -> Iterator[Relay]:
    """Runs a relay.

    Args:
        port_file: where the server writes its real port before the first connection.
        dies_after_bytes: of what it brings to the server: then it kills itself.
    """
    here, there = fork_server().Pipe(duplex=False)
    process = started(_relay, there, port_file, dies_after_bytes)
    try:
        assert here.poll(_START_S), "the relay does not start"
        assert process.pid is not None
        yield Relay(int(here.recv()), process.pid, process)
    finally:
        process.kill()
        process.join(20)


def _relay(answer: Connection, port_file: Path, dies_after_bytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    answer.send(listener.getsockname()[1])
    left_bytes = [dies_after_bytes]
    while True:
        client = listener.accept()[0]
        threading.Thread(target=_serve, args=(client, port_file, left_bytes), daemon=True).start()


def _serve(client: socket.socket, port_file: Path, left_bytes: list[int]) -> None:
    server = socket.create_connection(("127.0.0.1", int(port_file.read_text())))
    with client, server, suppress(OSError):
        while True:
            for ready in select.select([client, server], [], [])[0]:
                data = ready.recv(_PIECE_BYTES)
                if not data:
                    return
                (server if ready is client else client).sendall(data)
                left_bytes[0] -= len(data) if ready is client else 0
                if left_bytes[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
