"""What the ranks of a group know of each other: who is lost with whom, how each is reached, who receives whose objects.

Each rank runs a server. They are told apart from servers of other jobs, and of former groups of the same job, by a
random token that rank 0 makes anew whenever the ranks meet and that travels in the process group only.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replicas.placement import by_domain, partners
from torchelastic.checkpoint.replicas.receive import ReplicaStore
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
from torchelastic.checkpoint.replicas.replication_errors import NoReplicasAvailableError
from torchelastic.network.interface_choice import InterfaceError
from torchelastic.network.interfaces import address_towards, is_loopback
from torchelastic.network.this_host import chosen_address
from torchelastic.processes.identity import host_id
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url
from torchelastic.rendezvous.wire import INIT_METHOD_VARIABLE

if TYPE_CHECKING:
    from torchelastic.group.rank_group import RankGroup

#: Names what this rank fails with, if that is not its host.
FAILURE_DOMAIN_ENV = "TORCHELASTIC_FAILURE_DOMAIN"

#: So many transfers a server takes at once, or one from each rank if there are more of these: all may ask one rank, if
#: it is the last that has a copy.
_LEAST_TRANSFERS = 16


class ObjectManager(Protocol):
    """Whoever has the objects; `CheckpointObjectManager` of ML Flashpoint is one."""

    @property
    def shelf(self) -> ReplicaStore:
        """Where objects are received and given away."""

    def names_of(self, object_id: Any, /) -> str:
        """The id of an object between hosts."""

    def names_in(self, container_id: Any, there: Iterable[str], /) -> list[str]:
        """Of the ids that another host has, those of what this container is to hold; in the order to receive them."""


class DestinationStrategy(Protocol):
    """Says who receives the objects of a rank; `PairwiseReplicationStrategy` is one.

    A method `get_destination_ranks(rank)`, which returns ranks, is preferred where there is one.
    """

    def get_destination_addresses(self, global_rank: int, /) -> Sequence[str]:
        """The addresses ("host:port") of servers."""


@dataclass(frozen=True)
class ReplicationRetryConfig:
    """How patient transfers are.

    Attributes:
        max_retries: how often a transfer that broke is begun again.
        timeout_seconds: how long a peer may be silent, and for how long it is tried while it is busy.
    """

    max_retries: int = 3
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or not self.timeout_seconds > 0:
            raise ValueError(f"{self}: give 0 or more retries, and more than 0 seconds")


@dataclass(frozen=True)
class PeerTopology:
    """What the ranks of a group have exchanged; it pickles.

    Attributes:
        rank: the own one.
        hosts: the failure domain of each rank; those that give the same name are lost together.
        addresses: of each rank's server; empty in a group of one.
        partners_of: by rank, who receives its objects; empty if nobody does.
        token: the secret of this group; not shown.
        retry: how patient transfers are.
    """

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...] = ()
    partners_of: tuple[tuple[int, ...], ...] = ()
    token: str = field(default="", repr=False)
    retry: ReplicationRetryConfig = ReplicationRetryConfig()

    @property
    def partners(self) -> tuple[int, ...]:
        """Who receives the objects of this rank."""
        return self.partners_of[self.rank] if self.partners_of else ()

    def client(self, rank: int, retry_s: float | None = None) -> ReplicaClient:
        """Reaches a rank.

        Args:
            rank: whom.
            retry_s: for how long one that is lost or busy is tried again, however often; None: as `retry` says.

        Raises:
            NoReplicasAvailableError: there is none to reach.
        """
        if not 0 <= rank < len(self.addresses):
            raise NoReplicasAvailableError(f"there is no rank {rank} to reach among {len(self.addresses)}")
        retry, timeout_s = self.retry, self.retry.timeout_seconds
        return ReplicaClient(
            self.addresses[rank],
            self.token,
            timeout_s=timeout_s,
            retry_s=retry_s if retry_s is not None else timeout_s if retry.max_retries else 0.0,
            most_retries=retry.max_retries if retry_s is None else None,
        )

    def other_hosts(self) -> dict[str, list[int]]:
        """The ranks of each other host."""
        return {host: ranks for host, ranks in by_domain(self.hosts).items() if host != self.hosts[self.rank]}


def meet(
    ranks: RankGroup,
    call: str,
    shelf: Callable[[], ReplicaStore],
    retry: ReplicationRetryConfig,
    *,
    answer: Callable[[], Any] = lambda: None,
    choose: Callable[[PeerTopology], Sequence[int]] = lambda _: (),
    host: str | None = None,
    port: int = 0,
    replica_host: str | None = None,
) -> tuple[PeerTopology, ReplicaServer | None, list[Any]]:
    """Has all ranks of a group tell each other where they are and how they are reached. Collective.

    Args:
        ranks: of the group.
        call: for errors.
        shelf: gives what the server gives away; called after `answer`.
        retry: how patient transfers are.
        answer: what this rank has to say besides; JSON can hold it.
        choose: who receives the objects of this rank, given all but this; also called in a group of one.
        host: the failure domain of this rank; None: what the environment says, else the machine.
        port: of the server of the first rank of each machine; the next ones take the ports that follow. 0: free ones.
        replica_host: the address to listen on; None: found out.

    Returns:
        What the ranks told, the server of this rank (None if it is alone; to be closed), and
        what each said besides.

    Raises:
        CheckpointError: a rank failed or cannot listen; names it.
        OutOfStepError: a rank did not come; names it.
    """

    def introduce() -> list[Any]:
        domain = host or os.environ.get(FAILURE_DOMAIN_ENV) or host_id()
        return [network_id(), domain, secrets.token_hex(32), answer()]

    networks, hosts, tokens, told = zip(*ranks.run_on_all(f"{call}, meeting", introduce, is_long=True), strict=True)
    topology = PeerTopology(ranks.rank, hosts, token=tokens[0], retry=retry)
    if len(hosts) == 1:
        return replace(topology, partners_of=(tuple(choose(topology)),)), None, list(told)
    servers: list[ReplicaServer] = []

    def listen() -> list[Any]:
        servers.append(_listening(topology, shelf(), networks, port, replica_host))
        return list(servers[0].address)

    try:
        found = ranks.run_on_all(f"{call}, listening", listen, is_long=True)
        topology = replace(topology, addresses=tuple((str(address), int(port)) for address, port in found))
        chosen = ranks.run_on_all(f"{call}, choosing", lambda: list(choose(topology)))
    except BaseException:
        for server in servers:
            server.close()
        raise
    return replace(topology, partners_of=tuple(map(tuple, chosen))), servers[0], list(told)


def _listening(
    topology: PeerTopology, shelf: ReplicaStore, networks: Sequence[str], port: int, replica_host: str | None
) -> ReplicaServer:
    """The server of this rank; see `meet`."""
    rank, transfers = topology.rank, max(_LEAST_TRANSFERS, len(networks))
    server = ReplicaServer(
        shelf,
        topology.token,
        host=replica_host or address_among(networks),
        port=port + networks[:rank].count(networks[rank]) if port else 0,
        timeout_s=topology.retry.timeout_seconds,
        max_transfers=transfers,
        max_connections=2 * transfers,
    )
    server.start()
    return server


def destinations(strategy: DestinationStrategy | None, topology: PeerTopology, copies: int) -> list[int]:
    """Who receives the objects of the own rank.

    Args:
        strategy: None: cliques across hosts, see `partners`.
        topology: the group.
        copies: on how many other hosts each object is to be; for the strategy None.

    Raises:
        ValueError: the strategy names somebody who is not there, or the rank itself.
    """
    if strategy is None:
        return partners(topology.hosts, topology.rank, copies)
    by_rank = getattr(strategy, "get_destination_ranks", None)
    if by_rank is not None:
        chosen = [int(rank) for rank in by_rank(topology.rank)]
    else:
        known = {f"{host}:{port}": rank for rank, (host, port) in enumerate(topology.addresses)}
        wanted = [str(address) for address in strategy.get_destination_addresses(topology.rank)]
        unknown = [address for address in wanted if address not in known]
        if unknown:
            raise ValueError(f"repl_strategy names {', '.join(unknown)}, where no rank listens: {', '.join(known)} do")
        chosen = [known[address] for address in wanted]
    beyond = [rank for rank in chosen if not 0 <= rank < len(topology.addresses) or rank == topology.rank]
    if beyond:
        raise ValueError(f"repl_strategy gives the objects of rank {topology.rank} to rank(s) {beyond}")
    return chosen


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
