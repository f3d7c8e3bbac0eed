"""Pure: which copy of a shard is nearest, which copies are lost, and what may go. The same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchelastic.checkpoint.policy import KeepPolicy, KeptCheckpoint, prunable
from torchelastic.checkpoint.policy.keeping import rising_s
from torchelastic.checkpoint.restore_plan import Candidate, Distance, ShardSource
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

#: A save, and who holds its shards, by the ranks that wrote them; the place of a source is the number of a rank folder
#: on the host of that rank, which is not always its own.
LocalCandidate = Candidate[SaveId, int]


def shards_of(candidate: LocalCandidate) -> list[ShardId]:
    """All that a save consists of, by the ranks that wrote them."""
    return [ShardId(candidate.save, rank, len(candidate.whole)) for rank in candidate.whole]


def nearness(roots: Sequence[str]) -> Distance[int]:
    """How far a copy is: in the rank's own folder, on its host, or with one of the others, each starting anew.

    Args:
        roots: per rank, what identifies the folder that its rank folders lie in; ranks of one host share one.
    """

    def distance(reader: int, _: int, source: ShardSource) -> tuple[int, int]:
        if source == ShardSource(reader, str(reader)):
            return 0, 0
        if roots[source.rank] == roots[reader]:
            return 1, 0
        return 2, (source.rank - reader) % len(roots)  # so that not everybody asks the lowest rank first

    return distance


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
        for keeper in partners_of[owner]:
            if roots[keeper] not in has_it:
                lost.setdefault(keeper, []).append(shards_of(candidate)[shard])
    return lost


def folders_of(rank: int, roots: Sequence[str], present: Iterable[int]) -> list[int]:
    """The rank folders that a rank reports, serves and prunes.

    Its own; and the first of the ranks that share a root takes those in which nobody of them lives now, because the
    ranks were given out anew since.

    Args:
        rank: who asks.
        roots: see `nearness`.
        present: the rank folders that are there.
    """
    sharers = [other for other, root in enumerate(roots) if root == roots[rank]]
    left = sorted(set(present) - set(sharers)) if rank == sharers[0] else []
    return [rank, *left]


@dataclass(frozen=True)
class _KeptSave(KeptCheckpoint):
    save: SaveId = field(kw_only=True)


def to_prune(
    policy: KeepPolicy, complete: Mapping[SaveId, float], held: Iterable[SaveId], busy: Collection[SaveId]
) -> set[SaveId]:
    """Which of the saves that are held may be removed, now that the newest complete one is safe.

    Args:
        policy: which complete ones stay.
        complete: all complete ones, each with the time at which it was saved, in seconds.
        held: what there is.
        busy: what is still being written; stays.
    """
    saves = sorted(complete)
    if not saves:
        return set()
    times = rising_s(complete[save] for save in saves)
    oldest_first = [_KeptSave(save.step, saved_s, save=save) for save, saved_s in zip(saves, times, strict=True)]
    kept = set(saves) - {checkpoint.save for checkpoint in prunable(policy, oldest_first)}
    return {save for save in held if save <= saves[-1] and save not in kept and save not in busy}
