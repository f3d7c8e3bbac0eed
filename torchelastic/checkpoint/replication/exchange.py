"""Who sends which object to whom when shards are fetched back from their holders. Pure.

Every rank computes the same plan from the same two tables, so nobody has to be asked who sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError


class Identifier(Protocol):
    """What may name an object: hashable, and ordered among its like (str, int, tuples of these)."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


Id = TypeVar("Id", bound=Identifier)


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
    holders: dict[Id, list[int]] = {}
    for holder in sorted(available):
        for id_ in set(available[holder]):
            holders.setdefault(id_, []).append(holder)
    wishes = {receiver: id_ for receiver, id_ in sorted(wanted.items()) if id_ is not None}
    missing = sorted({id_ for id_ in wishes.values() if id_ not in holders})
    if missing:
        raise NoReplicasAvailableError(
            f"no member holds {', '.join(map(repr, missing))}; load an older checkpoint of which every shard is still "
            f"held by somebody, or one from durable storage"
        )
    unsized = sorted({id_ for id_ in wishes.values() if size_bytes is not None and id_ not in size_bytes})
    if unsized:
        raise ValueError(
            f"size_bytes lacks {', '.join(map(repr, unsized))}; give the size of each wanted object, or none"
        )
    load: dict[int, int] = dict.fromkeys(available, 0)
    order: dict[int, tuple[int, ...]] = {}
    for receiver, id_ in sorted(wishes.items(), key=lambda wish: (len(holders[wish[1]]), wish[0])):
        others = sorted((load[holder], holder) for holder in holders[id_] if holder != receiver)
        order[receiver] = tuple(holder for _, holder in others)
        if receiver in holders[id_]:
            order[receiver] = (receiver, *order[receiver])
        else:
            load[order[receiver][0]] += 1 if size_bytes is None else size_bytes[id_]
    plan: ExchangePlan[Id] = ExchangePlan(rank)
    for receiver, id_ in wishes.items():
        plan.plan(order[receiver][0], receiver, id_, fallbacks=order[receiver][1:])
    return plan
