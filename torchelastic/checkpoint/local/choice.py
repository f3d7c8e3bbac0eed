"""Pure: what can be loaded, from whom, and what may go, given what every rank holds. The same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchelastic.checkpoint.local.names import LocalSave, Shard
from torchelastic.checkpoint.policy import KeepPolicy, KeptCheckpoint, prunable
from torchelastic.checkpoint.policy.keeping import rising_s


@dataclass(frozen=True, order=True)
class Holding:
    """A place where a shard lies.

    Attributes:
        rank: who reports it, and gives it away.
        folder: the rank folder that it lies in, on that rank's host; not always the rank's own, see `roots`.
    """

    rank: int
    folder: int


@dataclass(frozen=True)
class Survey:
    """Who holds what, as all ranks have told each other.

    Attributes:
        holdings: of each shard, where it lies; at least one place each.
        saved_s: when each save began, in seconds of wall time.
    """

    holdings: Mapping[Shard, tuple[Holding, ...]] = field(default_factory=dict)
    saved_s: Mapping[LocalSave, float] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Sequence[Iterable[tuple[Shard, int, float]]]) -> Survey:
        """Puts the reports of all ranks together.

        Args:
            reports: per rank, the shards that it holds, the folder of each, and when it was saved.
        """
        found: dict[Shard, set[Holding]] = {}
        times: dict[LocalSave, float] = {}
        for rank, report in enumerate(reports):
            for shard, folder, saved_s in report:
                found.setdefault(shard, set()).add(Holding(rank, folder))
                times[shard.save] = max(saved_s, times.get(shard.save, saved_s))
        return cls({shard: tuple(sorted(places)) for shard, places in found.items()}, times)

    @property
    def newest_generation(self) -> int:
        """The largest that anybody has seen; -1 if there is none."""
        return max((shard.save.generation for shard in self.holdings), default=-1)

    def complete(self) -> list[LocalSave]:
        """The saves of which every shard lies somewhere, newest first."""
        ranks_of: dict[LocalSave, set[int]] = {}
        for shard in self.holdings:
            ranks_of.setdefault(shard.save, set()).add(shard.rank)
        return sorted((save for save, ranks in ranks_of.items() if len(ranks) == save.world_size), reverse=True)

    def incomplete(self) -> dict[LocalSave, list[int]]:
        """The other saves, and the ranks whose shards are missing."""
        complete = set(self.complete())
        saves = {shard.save for shard in self.holdings} - complete
        return {
            save: [rank for rank in range(save.world_size) if save.shard(rank) not in self.holdings]
            for save in sorted(saves, reverse=True)
        }

    def places(self, shard: Shard, reader: int, roots: Sequence[str]) -> list[Holding]:
        """Where a rank should look for a shard: its own folder, then its host, then the others, each starting anew.

        Args:
            shard: what is wanted.
            reader: who wants it.
            roots: per rank, what identifies the folder that its rank folders lie in; ranks of one host share one.
        """

        def distance(place: Holding) -> tuple[int, int]:
            if place == Holding(reader, reader):
                return 0, 0
            if roots[place.rank] == roots[reader]:
                return 1, 0
            return 2, (place.rank - reader) % len(roots)  # so that not everybody asks the lowest rank first

        return sorted(self.holdings.get(shard, ()), key=distance)

    def lost_copies(
        self, save: LocalSave, roots: Sequence[str], cliques: Sequence[Collection[int]]
    ) -> dict[int, list[Shard]]:
        """The shards that ranks are to hold for others, and of which nothing lies on their hosts any more.

        Args:
            save: a complete one. Where another number of ranks has saved it, shard s counts as that of rank s modulo
                today's.
            roots: see `places`.
            cliques: per rank, who keeps copies of its shards, itself included.
        """
        lost: dict[int, list[Shard]] = {}
        for shard in map(save.shard, range(save.world_size)):
            owner = shard.rank % len(roots)
            has_it = {roots[place.rank] for place in self.holdings.get(shard, ())}
            for keeper in sorted(set(cliques[owner]) - {owner}):
                if roots[keeper] not in has_it:
                    lost.setdefault(keeper, []).append(shard)
        return lost


def folders_of(rank: int, roots: Sequence[str], present: Iterable[int]) -> list[int]:
    """The rank folders that a rank reports, serves and prunes.

    Its own; and the first of the ranks that share a root takes those in which nobody of them lives now, because the
    ranks were given out anew since.

    Args:
        rank: who asks.
        roots: see `Survey.places`.
        present: the rank folders that are there.
    """
    sharers = [other for other, root in enumerate(roots) if root == roots[rank]]
    left = sorted(set(present) - set(sharers)) if rank == sharers[0] else []
    return [rank, *left]


@dataclass(frozen=True)
class _Kept(KeptCheckpoint):
    save: LocalSave = field(kw_only=True)


def to_prune(
    policy: KeepPolicy, complete: Mapping[LocalSave, float], held: Iterable[LocalSave], busy: Collection[LocalSave]
) -> set[LocalSave]:
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
    oldest_first = [_Kept(save.iteration, saved_s, save=save) for save, saved_s in zip(saves, times, strict=True)]
    kept = set(saves) - {checkpoint.save for checkpoint in prunable(policy, oldest_first)}
    return {save for save in held if save <= saves[-1] and save not in kept and save not in busy}
