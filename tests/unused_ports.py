"""Ports for servers that a test starts a moment later, in another process."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_FIRST_PORT = 10_000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOICE = random.SystemRandom()  # another test's seed must not make two runs choose alike


def unused_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1, all different, on which nobody listens or is connected.

    They lie below the ports that the system gives to connections. A port that was asked of the system with `bind(0)`
    and closed again can be the local end of anybody's connection when the server at last binds it.
    """
    end = int(_EPHEMERAL_PORTS.read_text().split()[0])
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = _CHOICE.randrange(_FIRST_PORT, end)
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
