"""Pure: which checkpoints can be restored, from whom each rank gets which shard, and which copies are missing then.

Every rank computes the same from what all of them have exchanged, so nobody has to be asked. Nothing is known here of
folders and connections.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torchelastic.text import shortlist

if TYPE_CHECKING:
    from torchelastic.checkpoint.store.save_id import SaveId
    from torchelastic.checkpoint.store.tier import TierEntry


class Identifier(Protocol):
    """What may name a shard: hashable, and ordered among its like (str, int, tuples of these)."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


#: Of a shard, or of whatever else is read: in a checkpoint the rank that wrote it.
Id = TypeVar("Id", bound=Identifier)


@dataclass(frozen=True, order=True)
class ShardSource:
    """Where a shard can be read.

    Attributes:
        rank: who reads it there, and gives it to others; counted in the group that restores.
        place: which of the places of this rank: the name of a tier.
    """

    rank: int
    place: str = ""

    def __str__(self) -> str:
        return self.place or f"rank {self.rank}"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, as all ranks together can read it.

    Attributes:
        save: which it is.
        world_size: how many shards it has in all, each by the rank that wrote it.
        sources: by shard, where it can be read; shards that nobody has are left out.
        is_committed: whether anybody knows that it was completed.
        damages: what cannot be read of it, in words.
    """

    save: SaveId
    world_size: int
    sources: Mapping[int, tuple[ShardSource, ...]]
    is_committed: bool
    damages: tuple[str, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """What is to be said when it was restored all the same."""
        return [f"{damage}; {self.save} was restored from other copies" for damage in self.damages]

    @property
    def missing(self) -> list[int]:
        """The shards that nobody has."""
        return [shard for shard in range(self.world_size) if shard not in self.sources]

    @property
    def is_complete(self) -> bool:
        """Whether it can be restored."""
        return self.is_committed and not self.missing

    @property
    def fault(self) -> str:
        """Why what was completed once, as far as anybody can tell, cannot be restored; empty if it can, or never was.

        That its shards are good only a reader finds out.
        """
        lack = f"{self.save} lacks the shards of rank(s) {shortlist(self.missing, 8)}" if self.missing else ""
        if self.is_committed:
            return ": ".join([lack, *self.damages]) if lack else ""
        return f"{self.save}: {'; '.join(self.damages)}" if self.damages else ""


def candidates(held: Sequence[Iterable[TierEntry]]) -> list[Candidate]:
    """All checkpoints of which anybody has anything, the newest first; also those that are not complete.

    Args:
        held: by rank, what it can read; all ranks of the group that restores.
    """
    found: dict[tuple[SaveId, int], dict[int, set[ShardSource]]] = defaultdict(lambda: defaultdict(set))
    committed: set[SaveId] = set()
    damages: dict[SaveId, list[str]] = defaultdict(list)
    for rank, each in enumerate(held):
        for one in each:
            sources = found[one.name, one.world_size]
            for shard in set(one.ranks) & set(range(one.world_size)):
                sources[shard].add(ShardSource(rank, one.place))
            if one.is_committed:
                committed.add(one.name)
            if one.damage is not None and one.damage not in damages[one.name]:
                damages[one.name].append(one.damage)
    return [
        Candidate(
            save,
            world_size,
            {shard: tuple(sorted(sources[shard])) for shard in sorted(sources)},
            save in committed,
            tuple(damages[save]),
        )
        for (save, world_size), sources in sorted(found.items(), key=lambda item: item[0], reverse=True)
    ]


def own_first(reader: int, source: ShardSource) -> bool:
    """What a rank can read itself is nearest; all others are equally far."""
    return source.rank != reader


def nearness(folders: Sequence[str]) -> Distance:
    """How far a copy is: in the rank's own folder, with one of the others, each starting anew, or in a place of all.

    Args:
        folders: of each rank, what identifies the folder that it uses; ranks of one host may share one. A source with a
            place does not lie there, but where every rank can read it.
    """

    def distance(reader: int, source: ShardSource) -> int:
        if source.place:
            return 1 + len(folders)
        if folders[source.rank] == folders[reader]:
            return 0
        return 1 + (source.rank - reader) % len(folders)  # so that not everybody asks the lowest rank first

    return distance


#: How far a source is for a rank that reads: anything that can be ordered.
Distance = Callable[[int, ShardSource], Any]


def plan_reads(
    sources: Mapping[Id, Collection[ShardSource]],
    wanted: Mapping[int, Iterable[Id]],
    *,
    distance: Distance = own_first,
) -> dict[int, dict[Id, tuple[ShardSource, ...]]]:
    """Orders the sources of each shard for each rank that wants it: the nearest first, others for when it is damaged.

    Of equally near ones the one is asked that has least to give to others, then that of the lowest rank. Shards with
    the fewest sources are given away first, so that these are still free.

    Args:
        sources: by shard, where it can be read; see `Candidate`.
        wanted: by rank, which shards it needs.
        distance: how far a source is.

    Returns:
        For each rank and shard that was wanted the sources, best first; none where nobody has the shard.
    """
    given: dict[int, int] = defaultdict(int)
    plan: dict[int, dict[Id, tuple[ShardSource, ...]]] = {reader: {} for reader in wanted}
    wishes = [(len(sources.get(shard, ())), reader, shard) for reader, shards in wanted.items() for shard in shards]
    for _, reader, shard in sorted(wishes):

        def key(source: ShardSource, reader: int = reader) -> Any:
            return distance(reader, source), given[source.rank], source

        plan[reader][shard] = ordered = tuple(sorted(sources.get(shard, ()), key=key))
        if ordered and ordered[0].rank != reader:
            given[ordered[0].rank] += 1
    return plan


def lacks(
    candidate: Candidate, own: Iterable[TierEntry], private: Collection[str], rank: int, world_size: int
) -> list[str]:
    """What a rank's own places have lost of a checkpoint that they had, in words.

    Args:
        candidate: the checkpoint.
        own: what this rank can read in its places.
        private: the places that each host has for itself.
        rank: who asks.
        world_size: how many ranks there are; another number than saved it has no shards of its own.
    """
    remarks = []
    for entry in own:
        if entry.name != candidate.save or entry.place not in private or entry.damage is not None:
            continue  # damage is told by `Candidate.damages`
        if not entry.is_committed:
            remarks.append(f"{entry.name} has no manifest in the {entry.place} tier: it counts for nothing there")
        elif rank < entry.world_size == world_size and rank not in entry.ranks:
            remarks.append(f"the shard of rank {rank} of {entry.name} is missing in the {entry.place} tier")
    return remarks


# --- where each rank keeps what it fetches ----------------------------------------------------------------------------


def sources_elsewhere(
    sources: Mapping[Id, Collection[ShardSource]], shard: Id, rank: int, folders: Sequence[str]
) -> list[ShardSource]:
    """Where a shard can be read but in a rank's own folder, in the order in which that is to try.

    Args:
        sources: by shard, where it can be read.
        shard: which.
        rank: who asks.
        folders: see `nearness`.
    """
    nearest = plan_reads(sources, {rank: [shard]}, distance=nearness(folders))[rank][shard]
    return [source for source in nearest if source.place or folders[source.rank] != folders[rank]]


def kept(
    sources: Mapping[Id, Collection[ShardSource]], wanted: Mapping[int, Collection[Id]], folders: Sequence[str]
) -> dict[Id, set[ShardSource]]:
    """Where each shard can be read when all ranks have what they want in their folders.

    Args:
        sources: by shard, where it can be read before.
        wanted: by rank, which shards it fetches if they are not in its folder.
        folders: see `nearness`.
    """
    has_it = {(folders[rank], shard) for rank, shards in wanted.items() for shard in shards}
    return {
        shard: {*there, *(ShardSource(rank) for rank, folder in enumerate(folders) if (folder, shard) in has_it)}
        for shard, there in sources.items()
    }


def lost_copies(
    sources: Mapping[int, Collection[ShardSource]],
    folders: Sequence[str],
    hosts: Sequence[str],
    partners_of: Sequence[Collection[int]],
    *,
    own_too: bool = False,
) -> dict[int, list[int]]:
    """The shards that ranks are to hold for others, and that lie on fewer hosts than they should.

    Args:
        sources: by shard, where it can be read. Where another number of ranks has saved it, shard s counts as that of
            rank s modulo today's.
        folders: see `nearness`.
        hosts: of each rank; those of one host are lost together. One may have several folders.
        partners_of: per rank, who keeps copies of its shards; empty if nobody does.
        own_too: whether a rank gets its own shards back in this way; else it has brought them to its folder already.

    Returns:
        By rank, what it is to fetch.
    """
    lost: dict[int, list[int]] = {}
    for shard, everywhere in sources.items():
        there = [source for source in everywhere if not source.place]
        has_it, safe = {folders[source.rank] for source in there}, {hosts[source.rank] for source in there}
        owner = shard % len(folders)
        keepers = partners_of[owner] if partners_of else ()
        for keeper in (owner, *keepers) if own_too and keepers else keepers:
            if folders[keeper] not in has_it and len(safe) <= len(keepers):
                lost.setdefault(keeper, []).append(shard)
                has_it.add(folders[keeper])
                safe.add(hosts[keeper])
    return lost
