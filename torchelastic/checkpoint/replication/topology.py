"""What the ranks of a group know of each other: who is lost with whom, how each is reached, who receives whose objects.

Each rank runs a server. They are told apart from servers of other jobs, and of former groups of the same job, by a
random token that rank 0 makes anew whenever the ranks meet and that travels in the process group only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torchelastic.checkpoint.replication.addresses import address_among, network_id
from torchelastic.checkpoint.replication.client import ReplicaClient
from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError
from torchelastic.checkpoint.replication.placement import by_domain, partners
from torchelastic.checkpoint.replication.server import ReplicaServer
from torchelastic.checkpoint.replication.shelf import ReplicaShelf
from torchelastic.processes.identity import host_id

if TYPE_CHECKING:
    from torchelastic.group.rank_group import RankGroup

#: Names what this rank fails with, if that is not its host.
FAILURE_DOMAIN_ENV = "TORCHELASTIC_FAILURE_DOMAIN"

#: So many transfers a server takes at once, or one from each rank if there are more of these: all may ask one rank, if
#: it is the last that has a copy.
_LEAST_TRANSFERS = 16


class ObjectManager(Protocol):
    """Whoever has the objects; `memory.CheckpointObjectManager` is one."""

    @property
    def shelf(self) -> ReplicaShelf:
        """Where objects are received and given away."""

    def names_of(self, object_id: Any, /) -> object:
        """The id of an object between hosts, as what `str` makes of it."""


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
        max_retries: how often a transfer that broke is taken up again, from where it broke off.
        timeout_seconds: how long a peer may be silent, and for how long it is tried while it is busy.
    """

    max_retries: int = 3
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or not self.timeout_seconds > 0:
            raise ValueError(f"{self}: give 0 or more retries, and more than 0 seconds")


@dataclass(frozen=True)
class PeerTopology:
    """What the ranks of a group told each other; it pickles.

    Attributes:
        rank: the own one.
        hosts: the failure domain of each rank; those that give the same name are lost together.
        addresses: of each rank's server; empty in a group of one.
        partners: who receives the objects of this rank.
        token: the secret of this group; not shown.
        retry: how patient transfers are.
        copies: on how many other hosts each object is to be.
    """

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...] = ()
    partners: tuple[int, ...] = ()
    token: str = field(default="", repr=False)
    retry: ReplicationRetryConfig = ReplicationRetryConfig()
    copies: int = 0

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
    shelf: Callable[[], ReplicaShelf],
    retry: ReplicationRetryConfig,
    *,
    tell: Callable[[], Any] = lambda: None,
    host: str | None = None,
    port: int = 0,
    replica_host: str | None = None,
) -> tuple[PeerTopology, ReplicaServer | None, list[Any]]:
    """Has all ranks of a group tell each other where they are and how they are reached. Collective.

    Args:
        ranks: of the group.
        call: for errors.
        shelf: gives what the server gives away; called after `tell`.
        retry: how patient transfers are.
        tell: what this rank has to say besides; JSON can hold it.
        host: the failure domain of this rank; None: what the environment says, else the machine.
        port: of the server of the first rank of each machine; the next ones take the ports that follow. 0: free ones.
        replica_host: the address to listen on; None: found out.

    Returns:
        What the ranks told (nobody is a partner yet), the server of this rank (None if it is alone; to be closed), and
        what each said besides.

    Raises:
        CheckpointError: a rank failed or cannot listen; names it.
        OutOfStepError: a rank did not come; names it.
    """

    def introduce() -> list[Any]:
        domain = host or os.environ.get(FAILURE_DOMAIN_ENV) or host_id()
        return [network_id(), domain, secrets.token_hex(32), tell()]

    networks, hosts, tokens, told = zip(*ranks.run_on_all(f"{call}, meeting", introduce, is_long=True), strict=True)
    topology = PeerTopology(ranks.rank, hosts, token=tokens[0], retry=retry)
    if len(hosts) == 1:
        return topology, None, list(told)
    servers: list[ReplicaServer] = []

    def listen() -> list[Any]:
        transfers = max(_LEAST_TRANSFERS, len(hosts))
        server = ReplicaServer(
            shelf(),
            topology.token,
            host=replica_host or address_among(networks),
            port=port + networks[: ranks.rank].count(networks[ranks.rank]) if port else 0,
            timeout_s=retry.timeout_seconds,
            max_transfers=transfers,
            max_connections=2 * transfers,
        )
        servers.append(server)
        server.start()
        return list(server.address)

    try:
        found = ranks.run_on_all(f"{call}, listening", listen, is_long=True)
    except BaseException:
        for server in servers:
            server.close()
        raise
    addresses = tuple((str(address), int(port)) for address, port in found)
    return replace(topology, addresses=addresses), servers[0], list(told)


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
