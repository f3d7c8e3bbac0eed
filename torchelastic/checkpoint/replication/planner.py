"""The least extra replication such that any f domains may be lost, and the proof of it by enumeration. Pure.

In plain data parallelism every live rank already is a copy: nothing is planned. Sharded state is copied only as far as
no other domain holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Generic

from torchelastic.checkpoint.replication.balancing import Need, assign
from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError
from torchelastic.checkpoint.replication.exchange import Id
from torchelastic.checkpoint.replication.placement import FailureDomains, Level

#: Steps of the search for a lower peak: some 0.1 s. Small worlds are decided well before.
MOST_NODES = 20_000


@dataclass(frozen=True)
class Copy(Generic[Id]):
    """One shard to be copied from a rank that holds it to one that does not."""

    sender: int
    receiver: int
    shard: Id
    size_bytes: int


@dataclass(frozen=True)
class CoveragePlan(Generic[Id]):
    """What to copy.

    Attributes:
        copies: who sends what to whom, sorted by receiver and shard.
        losses: how many domains may be lost at once when all copies are made.
        level: what kind of domains these are.
        peak_is_least: whether the rank that receives most provably could not receive less with as few bytes in all.
    """

    copies: tuple[Copy[Id], ...]
    losses: int
    level: Level
    peak_is_least: bool

    @property
    def extra_bytes(self) -> int:
        """How much is copied in all: no plan for as many losses copies less."""
        return sum(copy.size_bytes for copy in self.copies)

    @property
    def received_bytes(self) -> dict[int, int]:
        """How much each receiver gets."""
        received: dict[int, int] = {}
        for copy in self.copies:
            received[copy.receiver] = received.get(copy.receiver, 0) + copy.size_bytes
        return received

    def applied_to(self, held: Mapping[int, Mapping[Id, int]]) -> dict[int, dict[Id, int]]:
        """Who holds what when all copies are made."""
        after = {rank: dict(shards) for rank, shards in held.items()}
        for copy in self.copies:
            after.setdefault(copy.receiver, {})[copy.shard] = copy.size_bytes
        return after


@dataclass(frozen=True)
class Loss(Generic[Id]):
    """What is gone for good if these domains are lost at once."""

    domains: tuple[str, ...]
    shards: tuple[Id, ...]


def coverage_plan(
    held: Mapping[int, Mapping[Id, int]],
    domains: FailureDomains,
    *,
    losses: int = 1,
    level: Level = "host",
    most_nodes: int = MOST_NODES,
) -> CoveragePlan[Id]:
    """Plans the fewest bytes after which any `losses` domains may be lost and every shard is left somewhere.

    A shard survives every such loss exactly if it is in `losses` + 1 domains, so each lacks a number of copies of its
    own and the sum is the least there is. Receivers are chosen so that the largest share is small (exactly so in small
    worlds, see `CoveragePlan.peak_is_least`), senders so that nobody sends much more than others.

    Args:
        held: for each rank the shards that it holds, with their sizes in bytes.
        domains: where the ranks are. Those that hold nothing may receive.
        losses: how many domains may be lost at once.
        level: which domains.
        most_nodes: bound of the search for a lower peak.

    Raises:
        ValueError: there are not `losses` + 1 domains, ranks are not in `domains`, or sizes contradict each other.
    """
    if losses < 0:
        raise ValueError(f"losses is {losses}; it must be 0 or more")
    sizes = _sizes(held)
    groups = domains.groups(level)
    if sizes and len(groups) <= losses:
        raise ValueError(
            f"{len(groups)} {level}(s) cannot survive the loss of any {losses}; lower losses to {len(groups) - 1}, "
            f"or run on at least {losses + 1} {level}s"
        )
    domain_of = domains.domain_of(level)
    holders = _holders(held, domain_of)
    needs: dict[Id, Need] = {}
    for shard in sorted(sizes):
        places = frozenset(domain_of[rank] for rank in holders[shard])
        if len(places) <= losses:
            needs[shard] = Need(sizes[shard], losses + 1 - len(places), places)
    assignment = assign(list(needs.values()), domain_of, most_nodes=most_nodes)
    receivers = dict(zip(needs, assignment.receivers, strict=True))
    copies = _with_senders(receivers, holders, sizes)
    return CoveragePlan(copies, losses, level, assignment.is_least)


def rereplication_plan(
    held: Mapping[int, Mapping[Id, int]],
    lost: Collection[int],
    domains: FailureDomains,
    *,
    losses: int = 1,
    level: Level = "host",
) -> CoveragePlan[Id]:
    """Plans what the survivors send each other so that the next loss is survivable too.

    If fewer domains are left than `losses` asks for, the plan covers as many as are possible and says so in
    `CoveragePlan.losses`: a job that goes on with one host must not fail over this.

    Args:
        held: who held what before the loss.
        lost: the ranks that are gone.
        domains: where the ranks were, the lost ones included.
        losses: how many further domains may be lost at once.
        level: which domains.

    Raises:
        NoReplicasAvailableError: only lost ranks held some shards; names them.
        ValueError: nobody is left, or as `coverage_plan` does.
    """
    left = domains.without(lost)
    survivors = {rank: shards for rank, shards in held.items() if rank not in lost}
    gone = sorted(set(_sizes(held)) - set(_sizes(survivors)))
    if gone:
        raise NoReplicasAvailableError(
            f"nobody who is left holds {', '.join(map(repr, gone))}; restore an older checkpoint or a durable one"
        )
    possible = min(losses, len(left.groups(level)) - 1)
    return coverage_plan(survivors, left, losses=possible, level=level)


def proof(
    held: Mapping[int, Mapping[Id, int]], domains: FailureDomains, *, losses: int = 1, level: Level = "host"
) -> list[Loss[Id]]:
    """Tries every set of `losses` domains and tells what its loss would destroy; an empty list proves coverage.

    Args:
        held: who holds what, for example `plan.applied_to(held)`.
        domains: where the ranks are.
        losses: how many domains are lost at once. All C(domains, losses) sets are tried.
        level: which domains.

    Raises:
        ValueError: ranks are not in `domains`, or sizes contradict each other.
    """
    domain_of = domains.domain_of(level)
    holders = _holders(held, domain_of)
    places = {shard: {domain_of[rank] for rank in holders[shard]} for shard in sorted(_sizes(held))}
    names = sorted(set(domain_of.values()))
    found = []
    for lost in combinations(names, min(losses, len(names))):
        shards = tuple(shard for shard, where in places.items() if where <= set(lost))
        if shards:
            found.append(Loss(lost, shards))
    return found


def _sizes(held: Mapping[int, Mapping[Id, int]]) -> dict[Id, int]:
    sizes: dict[Id, int] = {}
    for rank in sorted(held):
        for shard, size_bytes in held[rank].items():
            if size_bytes < 0:
                raise ValueError(f"shard {shard!r} of rank {rank} has {size_bytes} bytes; a size is 0 or more")
            if sizes.setdefault(shard, size_bytes) != size_bytes:
                raise ValueError(
                    f"shard {shard!r} has {size_bytes} bytes at rank {rank} and {sizes[shard]} at another; give "
                    f"different contents different ids (add the iteration, for example)"
                )
    return sizes


def _holders(held: Mapping[int, Mapping[Id, int]], domain_of: Mapping[int, str]) -> dict[Id, list[int]]:
    holders: dict[Id, list[int]] = {}
    for rank in sorted(held):
        if rank not in domain_of:
            raise ValueError(f"rank {rank} holds shards and is in no failure domain; add it to the roster")
        for shard in held[rank]:
            holders.setdefault(shard, []).append(rank)
    return holders


def _with_senders(
    receivers: Mapping[Id, tuple[int, ...]], holders: Mapping[Id, list[int]], sizes: Mapping[Id, int]
) -> tuple[Copy[Id], ...]:
    """Those with the fewest holders first, then the largest; each from the holder that has sent least."""
    sent: dict[int, int] = {}
    copies: list[Copy[Id]] = []
    for shard in sorted(receivers, key=lambda shard: (len(holders[shard]), -sizes[shard], shard)):
        for receiver in receivers[shard]:
            sender = min(holders[shard], key=lambda rank: (sent.get(rank, 0), rank))
            sent[sender] = sent.get(sender, 0) + sizes[shard]
            copies.append(Copy(sender, receiver, shard, sizes[shard]))
    return tuple(sorted(copies, key=lambda copy: (copy.receiver, copy.shard)))
