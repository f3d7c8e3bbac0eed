"""Ports of this host: some that nobody uses, and whether one is in use; the kernel lists every socket (Linux)."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

_FILES = ("/proc/net/tcp", "/proc/net/tcp6")
_FIRST_PORT = 10_000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: So many ports are tried for each that is wanted.
_TRIES = 100
#: A seed must not make two processes choose alike.
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


def unused_ports(address: str, count: int = 1) -> list[int]:
    """Ports of this address, all different, at which nobody listens, for servers that are started a moment later.

    They lie below those that the system gives to connections: one of them could be the local end of anybody's
    connection when the server binds it. Where those are all taken, or given to connections too, the system is asked.

    Raises:
        OSError: the address is not of this host.
    """
    try:
        end = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    tries = [_CHOICE.randrange(_FIRST_PORT, end) for _ in range(_TRIES * count)] if end > _FIRST_PORT else []
    found: list[int] = []
    with ExitStack() as held:  # until all are found, so that none is found twice
        for port in (*tries, *[0] * count):
            if len(found) < count:
                probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
                try:
                    probe.bind((address, port))
                except OSError as error:
                    if port == 0 or error.errno != errno.EADDRINUSE:
                        raise
                    continue
                found.append(int(probe.getsockname()[1]))
    return found
