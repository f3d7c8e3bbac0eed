"""Pure: which copy of a shard is nearest, and which copies are lost. The same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchelastic.checkpoint.restore_plan import Candidate, Distance, ShardSource
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

#: A save, and who holds its shards, by the ranks that wrote them.
LocalCandidate = Candidate[SaveId, int]


def shards_of(candidate: LocalCandidate) -> list[ShardId]:
    """All that a save consists of, by the ranks that wrote them."""
    return [ShardId(candidate.save, rank, len(candidate.whole)) for rank in candidate.whole]


def nearness(roots: Sequence[str]) -> Distance[int]:
    """How far a copy is: on the rank's own host, or with one of the others, each starting anew.

    Args:
        roots: per rank, what identifies the folder of its host; ranks of one host share one.
    """

    def distance(reader: int, _: int, source: ShardSource) -> int:
        if roots[source.rank] == roots[reader]:
            return 0
        return 1 + (source.rank - reader) % len(roots)  # so that not everybody asks the lowest rank first

    return distance


def elsewhere(roots: Sequence[str], partners_of: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Of those that are to keep copies of each rank's shards the ones on other hosts: one host has one copy."""
    return tuple(
        tuple(partner for partner in partners if roots[partner] != roots[rank])
        for rank, partners in enumerate(partners_of)
    )


def lost_copies(
    candidate: LocalCandidate, roots: Sequence[str], partners_of: Sequence[Collection[int]]
) -> dict[int, list[ShardId]]:
    """The shards that ranks are to hold for others, and of which nothing lies on their hosts any more.

    Args:
        candidate: a complete one. Where another number of ranks has saved it, shard s counts as that of rank s modulo
            today's.
        roots: see `nearness`.
        partners_of: per rank, who keeps copies of its shards.
    """
    lost: dict[int, list[ShardId]] = {}
    for shard, sources in candidate.sources.items():
        owner = shard % len(roots)
        has_it = {roots[source.rank] for source in sources}
        for keeper in partners_of[owner] if partners_of else ():
            if roots[keeper] not in has_it:
                lost.setdefault(keeper, []).append(shards_of(candidate)[shard])
                has_it.add(roots[keeper])
    return lost
