"""Where this rank is, as the others see it: its network, its folder, and the address on which they reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.network.choice import InterfaceError
from torchelastic.network.interfaces import address_towards, is_loopback
from torchelastic.network.this_host import chosen_address
from torchelastic.processes.identity import host_id
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url
from torchelastic.rendezvous.wire import INIT_METHOD_VARIABLE


def network_id() -> str:
    """Equal for all processes that reach each other at 127.0.0.1: pods of one node have a network each."""
    try:
        return f"{host_id()}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return host_id()


def address_among(networks: Sequence[str]) -> str:
    """Where this rank listens for the others: on loopback if all are in one network, else at its own address.

    Args:
        networks: of all ranks; see `network_id`.

    Raises:
        CheckpointError: see `own_address`.
    """
    return "127.0.0.1" if len(set(networks)) == 1 else own_address()


def root_id(root: Path) -> str:
    """Equal for two processes that see the same folder."""
    status = root.stat()
    return f"{host_id()}/{status.st_dev}/{status.st_ino}"


def own_address() -> str:
    """The address of this host on the network over which the ranks found each other.

    That of the interface that was chosen for the launcher (`--iface`); else the source address of a packet to
    MASTER_ADDR, or to the run's etcd; where neither is set, or both lead nowhere, the address of the host's name.

    Raises:
        CheckpointError: all are addresses that only this host can reach, or the chosen interface is not there.
    """
    try:
        chosen = chosen_address()
    except InterfaceError as error:
        raise CheckpointError(str(error)) from error
    if chosen:
        return chosen
    for endpoint in _meeting_points():
        try:
            address = address_towards([endpoint])
        except OSError:
            continue  # its name is not known here
        if not is_loopback(address):
            return address
    address = socket.gethostbyname(socket.gethostname())
    if is_loopback(address):
        raise CheckpointError(
            f"{socket.gethostname()} knows itself only as {address}, where the other hosts cannot reach it: give the "
            "manager replica_host, the address of this host for the others"
        )
    return address


def _meeting_points() -> list[tuple[str, int]]:
    """(host, port) of what the ranks may have found each other by."""
    found = [(os.environ["MASTER_ADDR"], 9)] if os.environ.get("MASTER_ADDR") else []
    try:
        found += parse_url(os.environ.get(INIT_METHOD_VARIABLE, "")).endpoints
    except RendezvousUrlError:
        pass  # no launcher of ours, or a rendezvous of another kind
    return found
