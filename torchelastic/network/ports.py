"""Ports of this host: one that nobody uses, and whether one is in use; the kernel lists every socket (Linux)."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

_FILES = ("/proc/net/tcp", "/proc/net/tcp6")
_FIRST_PORT = 10_000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Where so many ports in a row are taken, or the system gives them all to connections, it is asked for one.
_TRIES = 100
#: A script's seed must not make two launchers choose alike.
_CHOICE = random.SystemRandom()


def kernel_tables() -> Iterator[str]:
    """The kernel's lists of TCP sockets, for IPv4 and IPv6; not one moment's: a row can be missed while others go."""
    for name in _FILES:
        try:
            yield Path(name).read_text()
        except OSError:
            continue  # without IPv6, for instance


def is_in(tables: Iterable[str], port: int) -> bool:
    r"""Whether a socket, in whatever state, has this port at one of its ends. Pure.

    >>> is_in(["sl local_address rem_address st\n 0: 0100007F:1F90 00000000:0000 0A"], 8080)
    True
    """
    end = f":{port:04X}"
    rows = (line.split() for table in tables for line in table.splitlines()[1:])
    return any(field.endswith(end) for row in rows for field in row[1:3])


def unused_port(address: str) -> int:
    """A port of this address that nobody listens at, for a server that another process starts later.

    It lies below those that the system gives to connections: one of them could be taken until the server binds it.

    Raises:
        OSError: the address is not of this host.
    """
    try:
        end = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    tried = [_CHOICE.randrange(_FIRST_PORT, end) for _ in range(_TRIES)] if end > _FIRST_PORT else []
    for port in tried:
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
