"""A connection of somebody else in this process, which nothing of ours may cut."""

from __future__ import annotations

import socket

#: Bytes that were sent are there at once.
SOON_S = 10.0


class Foreign:
    """A connection that another thread of this process has opened to a server of its own."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._near = socket.create_connection(self._listener.getsockname())
        self._far = self._listener.accept()[0]

    def is_alive(self) -> bool:
        """Whether something sent at one end comes at the other, both ways."""
        self._near.settimeout(SOON_S)
        self._far.settimeout(SOON_S)
        try:
            self._near.sendall(b"x")
            self._far.sendall(b"y")
            return (self._far.recv(1), self._near.recv(1)) == (b"x", b"y")
        except OSError:
            return False
