"""Which checkpoint can be recovered, who fetches what from whom, and which copies are missing then. Pure.

Every rank computes the same from what all of them have told each other. A *folder* is one container on one machine,
which the ranks there share; a *host* is what is lost at once, and may have several folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.memory.commit import CommitHead, objects_of
from torchelastic.checkpoint.memory.ids import COMMIT_FILE
from torchelastic.checkpoint.replication.placement import by_domain, missing_copies
from torchelastic.checkpoint.restore_plan import Candidate, Held, ShardSource, candidates, plan_reads
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierEntry


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
    """One object to be fetched.

    Attributes:
        file: a shard or the commit.
        receiver: the rank that fetches it into its folder.
        holders: the ranks that can give it, in the order in which to ask.
        size_bytes: of the shard; 0 for the commit.
    """

    file: str
    receiver: int
    holders: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class RecoveryPlan:
    """How a checkpoint gets to where it is needed.

    Attributes:
        candidate: the checkpoint.
        fetches: what has to be done before it is loaded.
        replicas: what is to be done afterwards, so that any host may be lost again.
        holders: of each object, the ranks that can read it before anything is fetched.
    """

    candidate: CommitHead
    fetches: tuple[Fetch, ...]
    replicas: tuple[Fetch, ...]
    holders: Mapping[str, tuple[int, ...]]


#: Of each folder the objects of one checkpoint that were verified there, with their sizes in bytes (commit: 0).
Verified = Mapping[str, Mapping[str, int]]
#: A checkpoint, and which ranks can read the shards of those that have saved it.
MemoryCandidate = Candidate[SaveId, int]


def listed_in(listings: Mapping[str, Sequence[TierEntry]], roster: Roster) -> list[MemoryCandidate]:
    """The checkpoints of which there is a commit, newest first; by folder what is there."""
    found = candidates([[entry.held("") for entry in listings[folder]] for folder in roster.folders])
    return [candidate for candidate in found if candidate.is_committed]


def verification_share(
    entries: Sequence[TierEntry], candidate: CommitHead, ranks: Sequence[int], rank: int
) -> list[str]:
    """Which objects of a folder one of its ranks is to verify: as many as each of the others.

    Args:
        entries: of the folder.
        candidate: the checkpoint.
        ranks: that use the folder.
        rank: one of them.
    """
    here = [file for entry in entries if entry.name == candidate.name for file in objects_of(entry)]
    return here[ranks.index(rank) :: len(ranks)]


def recovery_plan(candidate: CommitHead, verified: Verified, roster: Roster, copies: int = 1) -> RecoveryPlan:
    """Plans the recovery of a checkpoint: every folder gets the commit, and the shards of its ranks that exist now.

    Shards of ranks that do not exist any more stay where they are; those of new ranks do not exist. Who gives what is
    spread over the holders.

    Args:
        candidate: the checkpoint.
        verified: its good copies.
        roster: the ranks that are there now.
        copies: on how many other hosts each shard is to be in the end; fewer if there are fewer.

    Raises:
        CorruptCheckpointError: an object is held by nobody; names it.
    """
    objects = (*candidate.files, COMMIT_FILE)
    (found,) = candidates([[Held(candidate.name, objects, verified.get(folder, {}))] for folder in roster.folders])
    if found.missing:
        raise CorruptCheckpointError(f"nobody has a good copy of {', '.join(found.missing[:8])}")
    sizes = {file: size_bytes for files in verified.values() for file, size_bytes in files.items()}
    wanted = {rank: candidate.files_of([rank]) for rank in range(len(roster.folders))}
    for ranks in roster.sharers.values():
        wanted[ranks[0]].append(COMMIT_FILE)
    fetches = []
    for receiver, files in plan_reads(found.sources, wanted, size_bytes=sizes).items():
        for file, sources in files.items():
            if ShardSource(receiver) not in sources:
                fetches.append(Fetch(file, receiver, tuple(source.rank for source in sources), sizes[file]))
    holders_of = {file: tuple(source.rank for source in sources) for file, sources in found.sources.items()}
    replicas = _missing_copies(candidate, verified, fetches, roster, copies)
    return RecoveryPlan(candidate, tuple(fetches), replicas, holders_of)


def _missing_copies(
    candidate: CommitHead, verified: Verified, fetches: Sequence[Fetch], roster: Roster, copies: int
) -> tuple[Fetch, ...]:
    """What is still on too few hosts when everything has been fetched."""
    after = {folder: dict(verified.get(folder, {})) for folder in roster.sharers}
    for fetch in fetches:
        after[roster.folders[fetch.receiver]][fetch.file] = fetch.size_bytes
    held: dict[int, dict[str, int]] = {}
    for folder, ranks in roster.sharers.items():
        for index, file in enumerate(candidate.files):  # each by one rank, so that all take part in sending
            if file in after[folder]:
                owners = [rank for rank in ranks if candidate.files_of([rank]) == [file]]
                sender = owners[0] if owners else ranks[index % len(ranks)]
                held.setdefault(sender, {})[file] = after[folder][file]
    found = []
    for copy in missing_copies(held, roster.hosts, losses=copies):
        others = [
            rank
            for rank, folder in enumerate(roster.folders)
            if copy.shard in after[folder] and rank != copy.sender and folder != roster.folders[copy.receiver]
        ]
        found.append(Fetch(copy.shard, copy.receiver, (copy.sender, *others), copy.size_bytes))
    return tuple(found)
