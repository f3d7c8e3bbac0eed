"""Whose a TCP connection on this host is: the kernel lists every socket with its user (Linux, /proc/net/tcp)."""

from __future__ import annotations

import ipaddress
import struct

from torchelastic.network.ports import kernel_tables

#: The list is not one moment's: a row can be missed while others come and go.
_TRIES = 3


def uid_of_peer(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The user whose socket is at the other end of a connection within this host; None: not known.

    Args:
        peer: (address, port) of the other end.
        here: of this end.
    """
    for _ in range(_TRIES):
        for table in kernel_tables():
            uid = uid_in(table, peer, here)
            if uid is not None:
                return uid
    return None


def uid_in(table: str, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The user of the socket with these two ends, of what the kernel lists. Pure."""
    locals_, remotes = _written(local), _written(remote)
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] in locals_ and fields[2] in remotes:
            return int(fields[7])
    return None


def _written(end: tuple[str, int]) -> frozenset[str]:
    """How the kernel writes an end: `0100007F:1F90` is 127.0.0.1:8080, words of 32 bits in the host's byte order."""
    address = ipaddress.ip_address(end[0])
    address = getattr(address, "ipv4_mapped", None) or address
    ways = [address.packed]
    if address.version == 4:
        ways.append(ipaddress.IPv6Address(f"::ffff:{address}").packed)  # as a socket for both kinds has it
    return frozenset(
        f"{''.join(f'{word:08X}' for word in struct.unpack(f'={len(way) // 4}I', way))}:{end[1]:04X}" for way in ways
    )
