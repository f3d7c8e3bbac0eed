"""Who computes what a second time: all pairs of workers come by in turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CheckPlace(NamedTuple):
    """One rank, as far as the choice goes by it.

    Attributes:
        kind: workers of one kind compute the same bits, see `worker_kind`.
        host: a number for its host.
        shards: that it computes in this step.
    """

    kind: int
    host: int
    shards: tuple[int, ...]


class Task(NamedTuple):
    """A shard that is computed twice.

    Attributes:
        shard: which.
        owner: the rank that computes it anyway.
        witness: who computes it too; the owner itself where nobody else is of its kind.
    """

    shard: int
    owner: int
    witness: int


def choose(places: Sequence[CheckPlace], number: int) -> Task | None:
    """The task of a check; None: no rank has a shard.

    Args:
        places: by rank.
        number: of the check, from 0 up.

    >>> places = [CheckPlace(1, 10, (0,)), CheckPlace(1, 10, (1,)), CheckPlace(1, 20, (2,))]
    >>> [choose(places, number)[1:] for number in range(4)]
    [(1, 2), (2, 0), (0, 2), (2, 1)]
    """
    pairs = _pairs(places)
    if not pairs:
        return None
    owner, witness = pairs[number % len(pairs)]
    shards = places[owner].shards
    return Task(shards[number // len(pairs) % len(shards)], owner, witness)


def third(places: Sequence[CheckPlace], task: Task) -> int | None:
    """Who decides where two differ: another rank of their kind, of a third host where there is one. None: nobody."""
    others = [
        rank for rank, place in enumerate(places) if rank not in task[1:] and place.kind == places[task.owner].kind
    ]
    hosts = {places[task.owner].host, places[task.witness].host}
    return min(others, key=lambda rank: (places[rank].host in hosts, rank), default=None)


def _pairs(places: Sequence[CheckPlace]) -> list[tuple[int, int]]:
    """Owners and witnesses: of different hosts where the owner has a match elsewhere, itself where it has none."""
    size = len(places)
    alike = [
        (owner, (owner + distance) % size)
        for distance in range(1, size)
        for owner in range(size)
        if places[owner].shards and places[owner].kind == places[(owner + distance) % size].kind
    ]
    elsewhere = [(owner, other) for owner, other in alike if places[owner].host != places[other].host]
    have_match = {owner for owner, _ in elsewhere}
    pairs = elsewhere + [(owner, other) for owner, other in alike if owner not in have_match]
    have_match = {owner for owner, _ in pairs}
    return pairs + [(rank, rank) for rank, place in enumerate(places) if place.shards and rank not in have_match]
