"""Who shares a host with whom, and how the managers of a group reach each other's shards."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.shard_folder import ShardFolder
from torchelastic.checkpoint.local.shard_write import Peers
from torchelastic.checkpoint.replication import ReplicaServer

#: For how long a peer may be silent in a transfer, at most.
MOST_SILENCE_S = 30.0

_LEAST_TRANSFERS = 16

log = logging.getLogger(__name__)

Together = Callable[[str, Callable[[], Any]], "list[Any]"]


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


def meet(folder: ShardFolder, together: Together, call: str, timeout_s: float, replica_host: str | None) -> Neighbours:
    """Has all ranks of a group tell each other where they are and how they are reached. Collective.

    Args:
        folder: what the server gives away.
        together: does a rank's part and returns the answers of all ranks, or raises on all of them.
        call: for errors.
        timeout_s: as for the manager.
        replica_host: the address to listen on; None: found out.
    """
    found = together(
        f"{call}, meeting", lambda: {"host": host_id(), "root": root_id(folder.root), "token": secrets.token_hex(32)}
    )
    hosts, roots, token = [each["host"] for each in found], [each["root"] for each in found], str(found[0]["token"])
    peers = Peers({}, token, min(timeout_s, MOST_SILENCE_S))
    if len(found) == 1:
        return Neighbours(hosts, roots, peers)
    servers: list[ReplicaServer] = []

    def listen() -> list[Any]:
        host = replica_host or ("127.0.0.1" if len(set(hosts)) == 1 else own_address())
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
        addresses = together(f"{call}, listening", listen)
    except BaseException:
        for server in servers:
            server.close()
        raise
    server = servers[0]
    server.start()
    reached = {rank: (str(host), int(port)) for rank, (host, port) in enumerate(addresses) if rank != folder.rank}
    return Neighbours(hosts, roots, Peers(reached, token, peers.timeout_s), server)


def host_id() -> str:
    """Equal for all processes on one host, also in containers; the name where there is no Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def root_id(root: Path) -> str:
    """Equal for two processes that see the same folder."""
    status = root.stat()
    return f"{host_id()}/{status.st_dev}/{status.st_ino}"


def own_address() -> str:
    """The address of this host on the network over which the ranks found each other.

    The source address of a packet to MASTER_ADDR; where that is not set, or leads nowhere, the address of the host's
    name.

    Raises:
        CheckpointError: both are addresses that only this host can reach.
    """
    try:
        family, _, _, _, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(master)  # sends nothing: it only makes the kernel choose a route
            address = str(probe.getsockname()[0])
        if not address.startswith("127.") and address != "::1":
            return address
    except (KeyError, OSError):
        pass  # no launcher set it, or its name is not known here
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        raise CheckpointError(
            f"{socket.gethostname()} knows itself only as {address}, where the other hosts cannot reach it: give the "
            "manager replica_host, the address of this host for the others"
        )
    return address
