"""Who sends which object to whom when shards are fetched back from their holders. Pure.

Every rank computes the same plan from the same two tables, so nobody has to be asked who sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError
from torchelastic.checkpoint.restore_plan import Id, ShardSource, plan_reads


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
    """Which objects go from whom to whom, in order, and who else has them.

    Args:
        rank: the rank that `required_ids()` speaks of if it is asked for none.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self._entries: list[ExchangePlanEntry[Id]] = []
        self._candidates: dict[tuple[int, Id], tuple[int, ...]] = {}

    def plan(self, sender: int, receiver: int, id_: Id, *, fallbacks: Collection[int] = ()) -> None:
        """Appends an entry.

        Args:
            sender: who sends.
            receiver: who receives.
            id_: what.
            fallbacks: who else holds it, best first; asked in turn if the sender's copy proves bad.
        """
        self._entries.append(ExchangePlanEntry(sender, receiver, id_))
        self._candidates[(receiver, id_)] = (sender, *fallbacks)

    @property
    def entries(self) -> tuple[ExchangePlanEntry[Id], ...]:
        """What was planned, in order."""
        return tuple(self._entries)

    def candidates(self, receiver: int, id_: Id) -> tuple[int, ...]:
        """Who may give `id_` to `receiver`, in the order in which to ask; empty if that was not planned."""
        return self._candidates.get((receiver, id_), ())

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
    available: Mapping[int, Collection[Id]],
    wanted: Mapping[int, Id | None],
    *,
    size_bytes: Mapping[Id, int] | None = None,
    rank: int | None = None,
) -> ExchangePlan[Id]:
    """Plans who gives each rank the object that it wants.

    Its own copy is preferred. Else the holder that has least to send gives it, of equals the lowest rank; objects with
    the fewest holders are given away first, so that these holders are still free. All other holders follow as
    candidates in the same order, because a copy may prove bad.

    Args:
        available: which ids each rank holds.
        wanted: which id each rank wants; None for nothing.
        size_bytes: the size of the objects in bytes, if they differ much; without it, each counts as one.
        rank: see `ExchangePlan`.

    Returns:
        The plan, its entries sorted by receiver.

    Raises:
        NoReplicasAvailableError: nobody holds some of what is wanted; names all of it.
        ValueError: `size_bytes` is given and leaves out an object that is wanted.
    """
    wishes = {receiver: [] if id_ is None else [id_] for receiver, id_ in wanted.items()}
    return plan_of_wishes(available, wishes, size_bytes=size_bytes, rank=rank)


def plan_of_wishes(
    available: Mapping[int, Collection[Id]],
    wanted: Mapping[int, Sequence[Id]],
    *,
    size_bytes: Mapping[Id, int] | None = None,
    rank: int | None = None,
) -> ExchangePlan[Id]:
    """The same where a rank may want several objects; see `retrieve_plan`."""
    sources: dict[Id, set[ShardSource]] = {}
    for holder, ids in available.items():
        for id_ in ids:
            sources.setdefault(id_, set()).add(ShardSource(holder))
    wishes = {id_ for each in wanted.values() for id_ in each}
    missing = sorted(wishes - sources.keys())
    if missing:
        raise NoReplicasAvailableError(
            f"no member holds {', '.join(map(repr, missing))}; load an older checkpoint of which every shard is still "
            f"held by somebody, or one from durable storage"
        )
    unsized = sorted(wishes - size_bytes.keys()) if size_bytes is not None else []
    if unsized:
        raise ValueError(
            f"size_bytes lacks {', '.join(map(repr, unsized))}; give the size of each wanted object, or none"
        )
    reads = plan_reads(sources, wanted, size_bytes=size_bytes)
    plan: ExchangePlan[Id] = ExchangePlan(rank)
    for receiver in sorted(reads):
        for id_ in wanted[receiver]:
            first, *others = (source.rank for source in reads[receiver][id_])
            plan.plan(first, receiver, id_, fallbacks=others)
    return plan
