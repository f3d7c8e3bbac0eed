"""Who shares a host with whom, and how the managers of a group reach each other's shards."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.shard_folder import ShardFolder
from torchelastic.checkpoint.local.shard_write import Peers
from torchelastic.checkpoint.replication import ReplicaServer
from torchelastic.group.rank_group import RankGroup
from torchelastic.network.choice import InterfaceError
from torchelastic.network.interfaces import address_towards, is_loopback
from torchelastic.network.this_host import chosen_address
from torchelastic.processes.identity import host_id
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url
from torchelastic.rendezvous.wire import INIT_METHOD_VARIABLE

#: For how long a peer may be silent in a transfer, at most.
MOST_SILENCE_S = 30.0
#: And as a part of the manager's timeout: whoever gives up on a silent peer must not be missed by the others meanwhile.
_SILENCE_PART = 1 / 4

_LEAST_TRANSFERS = 16


@dataclass(frozen=True)
class Neighbours:
    """What the ranks of a group told each other when they met.

    Attributes:
        hosts: per rank, what identifies its host (the boot of its kernel).
        roots: per rank, what identifies the folder that its rank folder lies in; ranks on one host may share one.
        peers: how to reach all other ranks.
        server: gives this rank's shards away; None if it is alone.
    """

    hosts: Sequence[str]
    roots: Sequence[str]
    peers: Peers
    server: ReplicaServer | None = None

    def peers_of(self, ranks: Iterable[int]) -> Peers:
        """How to reach some of the others."""
        addresses = {rank: self.peers.addresses[rank] for rank in ranks if rank in self.peers.addresses}
        return Peers(addresses, self.peers.token, self.peers.timeout_s)

    def close(self) -> None:
        """Stops the server."""
        if self.server is not None:
            self.server.close()


def meet(folder: ShardFolder, ranks: RankGroup, call: str, timeout_s: float, replica_host: str | None) -> Neighbours:
    """Has all ranks of a group tell each other where they are and how they are reached. Collective.

    Args:
        folder: what the server gives away.
        ranks: of the group.
        call: for errors.
        timeout_s: as for the manager.
        replica_host: the address to listen on; None: found out.
    """
    found = ranks.run_on_all(
        f"{call}, meeting",
        lambda: {
            "host": host_id(),
            "network": network_id(),
            "root": root_id(folder.root),
            "token": secrets.token_hex(32),
        },
    )
    networks = [each["network"] for each in found]
    hosts, roots, token = [each["host"] for each in found], [each["root"] for each in found], str(found[0]["token"])
    peers = Peers({}, token, min(_SILENCE_PART * timeout_s, MOST_SILENCE_S))
    if len(found) == 1:
        return Neighbours(hosts, roots, peers)
    servers: list[ReplicaServer] = []

    def listen() -> list[Any]:
        host = replica_host or address_among(networks)
        server = ReplicaServer(
            folder,
            token,
            host=host,
            timeout_s=peers.timeout_s,
            max_transfers=max(
                _LEAST_TRANSFERS, len(found)
            ),  # all may ask one at once, if it is the last that has a copy
            max_connections=2 * max(_LEAST_TRANSFERS, len(found)),
        )
        servers.append(server)
        return list(servers[0].address)

    try:
        addresses = ranks.run_on_all(f"{call}, listening", listen)
    except BaseException:
        for server in servers:
            server.close()
        raise
    server = servers[0]
    server.start()
    reached = {rank: (str(host), int(port)) for rank, (host, port) in enumerate(addresses) if rank != folder.rank}
    return Neighbours(hosts, roots, Peers(reached, token, peers.timeout_s), server)


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
