"""Pure: which checkpoints can be restored, from whom each rank gets which shard, and which copies are missing then.

Every rank computes the same from what all of them have told each other, so nobody has to be asked. What a checkpoint
and a shard are called is the caller's; nothing is known here of tiers, folders and connections.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.text import shortlist


class Identifier(Protocol):
    """What may name a checkpoint or a shard: hashable, and ordered among its like (str, int, tuples of these)."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


#: Of a checkpoint; the newest is the greatest.
Save = TypeVar("Save", bound=Identifier)
#: Of a shard, or of whatever else a checkpoint consists of.
Id = TypeVar("Id", bound=Identifier)


@dataclass(frozen=True, order=True)
class ShardSource:
    """Where a shard can be read.

    Attributes:
        rank: who reads it there, and gives it to others; counted in the group that restores.
        place: which of the places of this rank: the name of a tier, or a folder.
    """

    rank: int
    place: str = ""


@dataclass(frozen=True)
class Held(Generic[Save, Id]):
    """What one rank can read of one checkpoint in one place.

    Attributes:
        save: which checkpoint it is.
        whole: all shards that it consists of, wherever they are.
        shards: those that can be read here.
        place: see `ShardSource`.
        is_committed: whether it is known here that the checkpoint was completed.
    """

    save: Save
    whole: Sequence[Id]
    shards: Collection[Id]
    place: str = ""
    is_committed: bool = True


@dataclass(frozen=True)
class Candidate(Generic[Save, Id]):
    """A checkpoint, as all ranks together can read it.

    Attributes:
        save: which it is.
        whole: all shards that it consists of.
        sources: by shard, where it can be read; shards that nobody has are left out.
        is_committed: whether anybody knows that it was completed.
    """

    save: Save
    whole: tuple[Id, ...]
    sources: Mapping[Id, tuple[ShardSource, ...]]
    is_committed: bool

    @property
    def missing(self) -> list[Id]:
        """The shards that nobody has."""
        return [shard for shard in self.whole if shard not in self.sources]

    @property
    def is_complete(self) -> bool:
        """Whether it can be restored."""
        return self.is_committed and not self.missing

    def require_whole(self) -> None:
        """Raises: CorruptCheckpointError: nobody has a good copy of a shard; names it."""
        if self.missing:
            raise CorruptCheckpointError(f"nobody has a good copy of shard {shortlist(self.missing, 8)} of {self.save}")


def candidates(held: Sequence[Iterable[Held[Save, Id]]]) -> list[Candidate[Save, Id]]:
    """All checkpoints of which anybody has anything, the newest first; also those that are not complete.

    Args:
        held: by rank, what it can read; all ranks of the group that restores.
    """
    found: dict[tuple[Save, tuple[Id, ...]], dict[Id, set[ShardSource]]] = defaultdict(lambda: defaultdict(set))
    committed: set[Save] = set()
    for rank, each in enumerate(held):
        for one in each:
            sources = found[one.save, tuple(one.whole)]
            for shard in set(one.shards) & set(one.whole):
                sources[shard].add(ShardSource(rank, one.place))
            if one.is_committed:
                committed.add(one.save)
    return [
        Candidate(save, whole, {shard: tuple(sorted(sources[shard])) for shard in sorted(sources)}, save in committed)
        for (save, whole), sources in sorted(found.items(), key=lambda item: item[0], reverse=True)
    ]


def own_first(reader: int, shard: Any, source: ShardSource) -> bool:  # noqa: ARG001 - a `Distance`
    """What a rank can read itself is nearest; all others are equally far."""
    return source.rank != reader


def nearness(folders: Sequence[str]) -> Distance[Any]:
    """How far a copy is: in the rank's own folder, or with one of the others, each starting anew.

    Args:
        folders: of each rank, what identifies the folder that it uses; ranks of one host may share one.
    """

    def distance(reader: int, _: Any, source: ShardSource) -> int:
        if folders[source.rank] == folders[reader]:
            return 0
        return 1 + (source.rank - reader) % len(folders)  # so that not everybody asks the lowest rank first

    return distance


#: How far a source is for a rank (reader, shard, source): anything that can be ordered.
Distance = Callable[[int, Id, ShardSource], Any]


def plan_reads(
    sources: Mapping[Id, Collection[ShardSource]],
    wanted: Mapping[int, Iterable[Id]],
    *,
    distance: Distance[Id] = own_first,
    size_bytes: Mapping[Id, int] | None = None,
) -> dict[int, dict[Id, tuple[ShardSource, ...]]]:
    """Orders the sources of each shard for each rank that wants it: the nearest first, others for when it is damaged.

    Of equally near ones the one is asked that has least to give to others, then that of the lowest rank. Shards with
    the fewest sources are given away first, so that these are still free.

    Args:
        sources: by shard, where it can be read; see `Candidate`.
        wanted: by rank, which shards it needs.
        distance: how far a source is.
        size_bytes: of the shards, if they differ much; without it, each counts as one.

    Returns:
        For each rank and shard that was wanted the sources, best first; none where nobody has the shard.
    """
    given: dict[int, int] = defaultdict(int)
    plan: dict[int, dict[Id, tuple[ShardSource, ...]]] = {reader: {} for reader in wanted}
    wishes = [(len(sources.get(shard, ())), reader, shard) for reader, shards in wanted.items() for shard in shards]
    for _, reader, shard in sorted(wishes):

        def key(source: ShardSource, reader: int = reader, shard: Id = shard) -> Any:
            return distance(reader, shard, source), given[source.rank], source

        plan[reader][shard] = ordered = tuple(sorted(sources.get(shard, ()), key=key))
        if ordered and ordered[0].rank != reader:
            given[ordered[0].rank] += 1 if size_bytes is None else size_bytes[shard]
    return plan


# --- what is fetched, and kept ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetch(Generic[Id]):
    """One shard that a rank fetches from another one.

    Attributes:
        shard: which.
        receiver: the rank that fetches it.
        holders: the ranks that can give it, in the order in which to ask.
        size_bytes: how long it is.
    """

    shard: Id
    receiver: int
    holders: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class RestorePlan(Generic[Save, Id]):
    """How the shards of a checkpoint get to where they are wanted.

    Attributes:
        candidate: the checkpoint, and who can read its shards before anything is fetched.
        wanted: by rank, which shards it needs.
        fetches: what has to be done before it is loaded.
        copies: what is to be done afterwards, so that any host may be lost again.
    """

    candidate: Candidate[Save, Id]
    wanted: Mapping[int, Sequence[Id]]
    fetches: tuple[Fetch[Id], ...]
    copies: tuple[Fetch[Id], ...]


def restore_plan(
    candidate: Candidate[Save, Id],
    wanted: Mapping[int, Sequence[Id]],
    *,
    folders: Sequence[str],
    hosts: Sequence[str],
    size_bytes: Mapping[Id, int],
    losses: int,
) -> RestorePlan[Save, Id]:
    """Plans how ranks restore that keep what they fetch.

    Args:
        candidate: with the good copies alone; all ranks of a folder can read what is in it.
        wanted: by rank, which shards it needs.
        folders: of each rank, what identifies the folder that it keeps shards in.
        hosts: of each rank; those of one host are lost together. One may have several folders.
        size_bytes: of the shards.
        losses: see `missing_copies`.

    Raises:
        CorruptCheckpointError: a shard is held by nobody; names it.
    """
    candidate.require_whole()
    fetches = _fetches(candidate.sources, wanted, size_bytes)
    after = {shard: set(sources) for shard, sources in candidate.sources.items()}
    for fetch in fetches:
        folder = folders[fetch.receiver]
        after[fetch.shard] |= {ShardSource(rank) for rank, other in enumerate(folders) if other == folder}
    copies = missing_copies(after, hosts, size_bytes, losses=losses)
    return RestorePlan(candidate, wanted, tuple(fetches), tuple(copies))


def missing_copies(
    sources: Mapping[Id, Collection[ShardSource]],
    hosts: Sequence[str],
    size_bytes: Mapping[Id, int],
    *,
    losses: int,
) -> list[Fetch[Id]]:
    """Plans the fewest bytes after which any `losses` hosts may be lost and every shard is left somewhere.

    A shard survives every such loss exactly if `losses` + 1 hosts hold it, so each lacks a number of copies of its own
    and the sum is the least there is. The largest shards are placed first, each copy with the rank that receives least
    so far; senders take turns.

    Args:
        sources: by shard, who holds it.
        hosts: of each rank; those of one host are lost together. Ranks that hold nothing may receive.
        size_bytes: of the shards.
        losses: how many hosts may be lost at once. With fewer hosts than that and one more, each gets a copy: a job
            that goes on with one host must not fail over this.

    Returns:
        What is to be fetched, sorted by receiver and shard.
    """
    hosts_wanted = min(losses + 1, len(set(hosts)))
    received = [(0, rank) for rank in range(len(hosts))]  # a heap: who has received least is first
    wanted: dict[int, list[Id]] = {}
    for shard in sorted(sources, key=lambda shard: (-size_bytes[shard], shard)):
        there = {hosts[source.rank] for source in sources[shard]}
        passed_over = []
        while len(there) < hosts_wanted:
            received_bytes, rank = heapq.heappop(received)
            if hosts[rank] not in there:
                there.add(hosts[rank])
                wanted.setdefault(rank, []).append(shard)
                received_bytes += size_bytes[shard]
            passed_over.append((received_bytes, rank))
        for entry in passed_over:
            heapq.heappush(received, entry)
    return _fetches(sources, wanted, size_bytes)


def lost_copies(
    sources: Mapping[int, Collection[ShardSource]], folders: Sequence[str], partners_of: Sequence[Collection[int]]
) -> dict[int, list[int]]:
    """The shards that ranks are to hold for others, and of which nothing lies in their folders any more.

    Args:
        sources: by shard, where it can be read. Where another number of ranks has saved it, shard s counts as that of
            rank s modulo today's.
        folders: see `nearness`.
        partners_of: per rank, who keeps copies of its shards.
    """
    lost: dict[int, list[int]] = {}
    for shard, there in sources.items():
        has_it = {folders[source.rank] for source in there}
        for keeper in partners_of[shard % len(folders)] if partners_of else ():
            if folders[keeper] not in has_it:
                lost.setdefault(keeper, []).append(shard)
                has_it.add(folders[keeper])
    return lost


def _fetches(
    sources: Mapping[Id, Collection[ShardSource]], wanted: Mapping[int, Sequence[Id]], size_bytes: Mapping[Id, int]
) -> list[Fetch[Id]]:
    """What ranks want and cannot read themselves, from whom each gets it."""
    reads = plan_reads(sources, wanted, size_bytes=size_bytes)
    return [
        Fetch(shard, receiver, tuple(source.rank for source in reads[receiver][shard]), size_bytes[shard])
        for receiver in sorted(wanted)
        for shard in sorted(wanted[receiver])
        if all(source.rank != receiver for source in sources[shard])
    ]
