"""Which checkpoint can be recovered, who fetches what from whom, and which copies are missing then. Pure.

Every rank computes the same from what all of them have told each other. A *folder* is one container on one machine,
which the ranks there share; a *host* is what is lost at once, and may have several folders. A shard is told by its
rank; the one behind the last rank's is the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.replication.placement import by_domain, missing_copies
from torchelastic.checkpoint.restore_plan import Candidate, Held, ShardSource, candidates, plan_reads
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.text import shortlist


@dataclass(frozen=True)
class Roster:
    """Where the ranks are.

    Attributes:
        hosts: of each rank; those with the same host are lost together.
        folders: of each rank, what identifies the folder that it uses.
    """

    hosts: tuple[str, ...]
    folders: tuple[str, ...]

    @property
    def sharers(self) -> dict[str, list[int]]:
        """The ranks that use each folder; the first of them acts for all."""
        return by_domain(self.folders)

    def is_first(self, rank: int) -> bool:
        """Whether this rank acts for all that use its folder."""
        return self.sharers[self.folders[rank]][0] == rank


@dataclass(frozen=True)
class Fetch:
    """One shard to be fetched.

    Attributes:
        shard: which.
        receiver: the rank that fetches it into its folder.
        holders: the ranks that can give it, in the order in which to ask.
        size_bytes: how long it is.
    """

    shard: ShardId
    receiver: int
    holders: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class RecoveryPlan:
    """How a checkpoint gets to where it is needed.

    Attributes:
        commit: the shard that is its commit.
        fetches: what has to be done before it is loaded.
        replicas: what is to be done afterwards, so that any host may be lost again.
        holders: of each shard, the ranks that can read it before anything is fetched.
        firsts: the ranks that complete it, each for all that use its folder.
    """

    commit: ShardId
    fetches: tuple[Fetch, ...]
    replicas: tuple[Fetch, ...]
    holders: Mapping[int, tuple[int, ...]]
    firsts: tuple[int, ...]


#: Of each folder the shards of one checkpoint that were verified there, with their sizes in bytes.
Verified = Mapping[str, Mapping[int, int]]
#: A checkpoint, and which ranks can read its shards.
MemoryCandidate = Candidate[SaveId, int]


def listed_in(listings: Mapping[str, Sequence[TierEntry]], roster: Roster) -> list[MemoryCandidate]:
    """The checkpoints of which there is a manifest, newest first; by folder what is there."""
    found = candidates([[entry.held("") for entry in listings[folder]] for folder in roster.folders])
    return [candidate for candidate in found if candidate.is_committed]


def verification_share(entries: Sequence[TierEntry], save: SaveId, ranks: Sequence[int], rank: int) -> list[int]:
    """Which shards of a folder one of its ranks is to verify: as many as each of the others.

    Args:
        entries: of the folder.
        save: the checkpoint.
        ranks: that use the folder.
        rank: one of them.
    """
    here = [shard for entry in entries if entry.name == save for shard in entry.ranks]
    return here[ranks.index(rank) :: len(ranks)]


def recovery_plan(commit: ShardId, verified: Verified, roster: Roster, copies: int = 1) -> RecoveryPlan:
    """Plans the recovery of a checkpoint: every folder gets the commit, and the shards of its ranks that exist now.

    Shards of ranks that do not exist any more stay where they are; those of new ranks do not exist. Who gives what is
    spread over the holders.

    Args:
        commit: the shard that is its commit.
        verified: its good copies.
        roster: the ranks that are there now.
        copies: on how many other hosts each shard is to be in the end; fewer if there are fewer.

    Raises:
        CorruptCheckpointError: a shard is held by nobody; names it.
    """
    whole = range(commit.world_size)
    (found,) = candidates([[Held(commit.name, whole, verified.get(folder, {}))] for folder in roster.folders])
    require_whole(found)
    sizes = {shard: size_bytes for shards in verified.values() for shard, size_bytes in shards.items()}
    wanted = {rank: [rank] if rank < commit.rank else [] for rank in range(len(roster.folders))}
    firsts = tuple(ranks[0] for ranks in roster.sharers.values())
    for rank in firsts:
        wanted[rank].append(commit.rank)
    fetches = []
    for receiver, shards in plan_reads(found.sources, wanted, size_bytes=sizes).items():
        for shard, sources in shards.items():
            if ShardSource(receiver) not in sources:
                holders = tuple(source.rank for source in sources)
                fetches.append(Fetch(_shard(commit, shard), receiver, holders, sizes[shard]))
    holders_of = {shard: tuple(source.rank for source in sources) for shard, sources in found.sources.items()}
    replicas = _missing_copies(commit, verified, fetches, roster, copies)
    return RecoveryPlan(commit, tuple(fetches), replicas, holders_of, firsts)


def require_whole(candidate: MemoryCandidate) -> None:
    """Raises: CorruptCheckpointError: nobody has a copy of a shard; names it."""
    if candidate.missing:
        raise CorruptCheckpointError(
            f"nobody has a good copy of shard {shortlist(candidate.missing, 8)} of {candidate.save}"
        )


def _shard(commit: ShardId, rank: int) -> ShardId:
    return ShardId(commit.name, rank, commit.world_size)


def _missing_copies(
    commit: ShardId, verified: Verified, fetches: Sequence[Fetch], roster: Roster, copies: int
) -> tuple[Fetch, ...]:
    """What is still on too few hosts when everything has been fetched."""
    after = {folder: dict(verified.get(folder, {})) for folder in roster.sharers}
    for fetch in fetches:
        after[roster.folders[fetch.receiver]][fetch.shard.rank] = fetch.size_bytes
    held: dict[int, dict[int, int]] = {}
    for folder, ranks in roster.sharers.items():
        for shard, size_bytes in sorted(after[folder].items()):  # each by one rank, so that all take part in sending
            sender = shard if shard in ranks else ranks[shard % len(ranks)]
            held.setdefault(sender, {})[shard] = size_bytes
    found = []
    for copy in missing_copies(held, roster.hosts, losses=copies):
        others = [
            rank
            for rank, folder in enumerate(roster.folders)
            if copy.shard in after[folder] and rank != copy.sender and folder != roster.folders[copy.receiver]
        ]
        found.append(Fetch(_shard(commit, copy.shard), copy.receiver, (copy.sender, *others), copy.size_bytes))
    return tuple(found)
