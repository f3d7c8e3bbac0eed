"""Who keeps copies of whose shards, and who gives a shard back to whom. Pure.

Every rank computes the same from the same tables, so nobody has to be asked. A *failure domain* is what is lost at
once: a host, or whatever else its ranks are named after (a rack, a spot pool).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from torchelastic.checkpoint.replicas.replication_errors import NoReplicasAvailableError
from torchelastic.checkpoint.store.restore_plan import Id, ShardSource, plan_reads


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[list[int]]:
    """Cuts the world into cliques of `replication_factor` ranks that are `replication_jump` apart.

    Ranks of equal remainder modulo the jump are walked in order and cut into runs (the rule of NVIDIA's NVRx,
    `local.replication.group_utils`): with 32 ranks, jump 8 and factor 2 the cliques are 0-8, 1-9, .. 7-15, 16-24, ..
    With as many ranks per host as the jump, the members of a clique are on different hosts.

    Args:
        replication_jump: distance between two members of a clique; the number of ranks on a host, for example.
        replication_factor: how many ranks hold each shard; 1 replicates nothing.
        world_size: number of ranks.

    Returns:
        The cliques, sorted by their first rank; each rank is in exactly one.

    Raises:
        ValueError: a number is below 1, or the world is no multiple of jump times factor.
    """
    for name, value in (
        ("replication_jump", replication_jump),
        ("replication_factor", replication_factor),
        ("world_size", world_size),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    block = replication_jump * replication_factor
    if world_size % block:
        raise ValueError(
            f"world_size {world_size} is no multiple of replication_jump {replication_jump} times replication_factor "
            f"{replication_factor} = {block}; run with a multiple of {block} ranks, or choose a smaller jump or factor"
        )
    return sorted(
        list(range(first, first + block, replication_jump))
        for start in range(0, world_size, block)
        for first in range(start, start + replication_jump)
    )


def partners(domains: Sequence[str], rank: int, copies: int) -> list[int]:
    """The ranks that receive a rank's shard, each in another failure domain; for any number of ranks.

    Ranks are laid out domain by domain and cut into `copies` + 1 equal runs; those of equal place make a clique, in
    which each gives to as many as are asked for. So hosts of equal size are partners as a whole, which leaves few sets
    of hosts whose loss hurts. With domains of very different sizes it is one rank of each of the next ones by name.

    Args:
        domains: the failure domain of each rank.
        rank: whose shard it is.
        copies: how many are wanted; fewer are made if there are fewer other domains.
    """
    ranks_of = by_domain(domains)
    copies = min(copies, len(ranks_of) - 1)
    number = len(domains) // (copies + 1)
    own = ranks_of[domains[rank]]
    if max(map(len, ranks_of.values())) <= number:
        laid_out = [each for ranks in ranks_of.values() for each in ranks]
        clique = laid_out[laid_out.index(rank) % number :: number]
        place = clique.index(rank) + 1
        return sorted((clique[place:] + clique[:place])[:copies])
    names = list(ranks_of)
    place = names.index(domains[rank]) + 1
    following = (names[place:] + names[:place])[:copies]
    return [ranks_of[name][own.index(rank) % len(ranks_of[name])] for name in following]


def holders_of(rank: int, replication_jump: int, replication_factor: int, domains: Sequence[str]) -> list[int]:
    """The ranks that hold the shard of one, itself included, sorted; for any number of ranks.

    Its clique, where `parse_group_sequence` can cut the world; else its `partners`, so that a job that has lost a rank
    goes on. If there are too few failure domains for these, the ranks between two jumps count as one each.

    Args:
        rank: whose shard it is.
        replication_jump: see `parse_group_sequence`.
        replication_factor: see `parse_group_sequence`; fewer where the world is smaller.
        domains: the failure domain of each rank.

    Raises:
        ValueError: a number is below 1.

    >>> [holders_of(rank, 1, 2, ["a", "b", "c", "d"]) for rank in range(4)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    >>> [holders_of(rank, 1, 2, ["a", "b", "c"]) for rank in range(3)]
    [[0, 1], [1, 2], [0, 2]]
    """
    numbers = replication_jump, replication_factor, len(domains)
    if min(numbers) < 1 or len(domains) % (replication_jump * replication_factor) == 0:
        return next(clique for clique in parse_group_sequence(*numbers) if rank in clique)
    if len(set(domains)) < replication_factor:
        domains = [f"{each // replication_jump:012}" for each in range(len(domains))]
    return sorted([rank, *partners(domains, rank, replication_factor - 1)])


def by_domain(domains: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each failure domain; both sorted."""
    found: dict[str, list[int]] = {}
    for rank in sorted(range(len(domains)), key=lambda rank: (domains[rank], rank)):
        found.setdefault(domains[rank], []).append(rank)
    return found


class PairwiseReplicationStrategy:
    """The partner of a rank is the rank of the same place on the other host of its pair.

    Hosts 0 and 1 are a pair, 2 and 3, and so on. If their number is odd, each of the last three gives to the next of
    the three. A single host has no partner.

    Args:
        replication_service_addresses: of the replica servers ("host:port"), by rank; those of a host are neighbours.
        processes_per_node: how many ranks a host has.

    Raises:
        ValueError: there are no addresses, or their number is no multiple of `processes_per_node`.
    """

    def __init__(self, replication_service_addresses: Sequence[str], processes_per_node: int) -> None:
        if not replication_service_addresses:
            raise ValueError("replication_service_addresses is empty: give the address of each rank's server")
        number = len(replication_service_addresses)
        if processes_per_node < 1 or number % processes_per_node:
            raise ValueError(
                f"{number} addresses are no multiple of processes_per_node={processes_per_node}: every host "
                "has to have as many ranks as the others; without repl_strategy that is not needed"
            )
        self._addresses = list(replication_service_addresses)
        self._per_host = processes_per_node

    def get_replication_service_addresses(self) -> list[str]:
        """The addresses, by rank."""
        return list(self._addresses)

    def get_destination_ranks(self, global_rank: int) -> list[int]:
        """Who receives the objects of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= global_rank < len(self._addresses):
            raise ValueError(f"there is no rank {global_rank} among {len(self._addresses)}")
        hosts = len(self._addresses) // self._per_host
        host, place = divmod(global_rank, self._per_host)
        if hosts == 1:
            return []
        ring = hosts - 3 if hosts % 2 else hosts  # where the last three begin
        partner = host ^ 1 if host < ring else ring + (host - ring + 1) % 3
        return [partner * self._per_host + place]

    def get_destination_addresses(self, global_rank: int) -> list[str]:
        """The addresses of `get_destination_ranks`."""
        return [self._addresses[rank] for rank in self.get_destination_ranks(global_rank)]


@dataclass(frozen=True)
class ExchangePlanEntry(Generic[Id]):
    """One object on its way.

    Attributes:
        sender: the rank that holds it. Equal to `receiver` if that rank has its own copy: then nothing travels.
        receiver: the rank that wants it.
        id_: the object.
    """

    sender: int
    receiver: int
    id_: Id


class ExchangePlan(Generic[Id]):
    """Which objects go from whom to whom, in order.

    Args:
        rank: the rank that `required_ids()` speaks of if it is asked for none.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self._entries: list[ExchangePlanEntry[Id]] = []

    def plan(self, sender: int, receiver: int, id_: Id) -> None:
        """Appends an entry: who sends, who receives, and what."""
        self._entries.append(ExchangePlanEntry(sender, receiver, id_))

    @property
    def entries(self) -> tuple[ExchangePlanEntry[Id], ...]:
        """What was planned, in order."""
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None) -> set[Id]:
        """The objects that a rank has to provide, its own copy for itself included.

        Args:
            rank: the rank; None for the one that the plan was made for.

        Raises:
            ValueError: neither this call nor the plan names a rank.
        """
        rank = self.rank if rank is None else rank
        if rank is None:
            raise ValueError("whose ids? Name a rank, here or when the plan is made")
        return {entry.id_ for entry in self._entries if entry.sender == rank}


def retrieve_plan(
    available: Mapping[int, Collection[Id]], wanted: Mapping[int, Iterable[Id]], *, rank: int | None = None
) -> ExchangePlan[Id]:
    """Plans who gives each rank the objects that it wants: its own copy if it has one; see `plan_reads`.

    Args:
        available: which ids each rank holds.
        wanted: which ids each rank wants.
        rank: see `ExchangePlan`.

    Returns:
        The plan, its entries sorted by receiver.

    Raises:
        NoReplicasAvailableError: nobody holds some of what is wanted; names all of it.
    """
    sources: dict[Id, set[ShardSource]] = {}
    for holder, ids in available.items():
        for id_ in ids:
            sources.setdefault(id_, set()).add(ShardSource(holder))
    missing = sorted({id_ for ids in wanted.values() for id_ in ids} - sources.keys())
    if missing:
        raise NoReplicasAvailableError(
            f"no member holds {', '.join(map(repr, missing))}; load an older checkpoint of which every shard is still "
            f"held by somebody, or one from durable storage"
        )
    reads = plan_reads(sources, wanted)
    plan: ExchangePlan[Id] = ExchangePlan(rank)
    for receiver in sorted(reads):
        for id_ in wanted[receiver]:
            plan.plan(reads[receiver][id_][0].rank, receiver, id_)
    return plan
