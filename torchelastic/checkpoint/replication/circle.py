"""What the ranks of a group know about each other, and who receives whose objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchelastic.checkpoint.replication.client import ReplicaClient
from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError
from torchelastic.checkpoint.replication.placement import partners
from torchelastic.checkpoint.replication.shelf import ReplicaShelf


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
class Circle:
    """What the ranks of a group told each other; it pickles.

    Attributes:
        rank: the own one.
        hosts: of each rank; those that give the same name are lost together.
        addresses: of each rank's server; empty in a group of one.
        partners: who receives the objects of this rank.
        token: the secret of this group.
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

    def client(self, rank: int) -> ReplicaClient:
        """Reaches a rank. Raises: NoReplicasAvailableError if there is none to reach."""
        if not 0 <= rank < len(self.addresses):
            raise NoReplicasAvailableError(f"there is no rank {rank} to reach among {len(self.addresses)}")
        retry = self.retry
        return ReplicaClient(
            self.addresses[rank],
            self.token,
            timeout_s=retry.timeout_seconds,
            retry_s=retry.timeout_seconds if retry.max_retries else 0.0,
            most_retries=retry.max_retries,
        )

    def other_hosts(self) -> dict[str, list[int]]:
        """The ranks of each other host."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            if host != self.hosts[self.rank]:
                found.setdefault(host, []).append(rank)
        return found


def destinations(
    strategy: DestinationStrategy | None, circle: Circle, addresses: Sequence[tuple[str, int]], copies: int
) -> list[int]:
    """Who receives the objects of the own rank.

    Args:
        strategy: None: cliques across hosts, see `partners`.
        circle: the group.
        addresses: of each rank's server.
        copies: on how many other hosts each object is to be; for the strategy None.

    Raises:
        ValueError: the strategy names somebody who is not there, or the rank itself.
    """
    if strategy is None:
        return partners(circle.hosts, circle.rank, copies)
    by_rank = getattr(strategy, "get_destination_ranks", None)
    if by_rank is not None:
        chosen = [int(rank) for rank in by_rank(circle.rank)]
    else:
        known = {f"{host}:{port}": rank for rank, (host, port) in enumerate(addresses)}
        wanted = [str(address) for address in strategy.get_destination_addresses(circle.rank)]
        unknown = [address for address in wanted if address not in known]
        if unknown:
            raise ValueError(f"repl_strategy names {', '.join(unknown)}, where no rank listens: {', '.join(known)} do")
        chosen = [known[address] for address in wanted]
    beyond = [rank for rank in chosen if not 0 <= rank < len(addresses) or rank == circle.rank]
    if beyond:
        raise ValueError(f"repl_strategy gives the objects of rank {circle.rank} to rank(s) {beyond}")
    return chosen
