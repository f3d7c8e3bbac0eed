"""Which checkpoint can be recovered, who fetches what from whom, and which copies are missing then. Pure.

Every rank computes the same from what all of them have told each other. A *folder* is one container on one machine,
which the ranks there share; a *host* is what is lost at once, and may have several folders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.memory.commit import CommitHead, StoredStep
from torchelastic.checkpoint.memory.ids import COMMIT_FILE
from torchelastic.checkpoint.replication.placement import by_domain, missing_copies
from torchelastic.checkpoint.restore_plan import Candidate, Held, ShardSource, candidates, plan_reads


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
#: A checkpoint, and which ranks can read its objects.
MemoryCandidate = Candidate[CommitHead, str]


def listed_in(listings: Mapping[str, Sequence[StoredStep]], roster: Roster) -> list[MemoryCandidate]:
    """The checkpoints of which there is a commit, newest first; by folder what is there."""
    heads = {one.commit for steps in listings.values() for one in steps if one.commit}
    here = {folder: {head: objects_in(steps, head) for head in heads} for folder, steps in listings.items()}
    return candidates([[_held(head, here[folder][head]) for head in heads] for folder in roster.folders])


def require_complete(candidate: MemoryCandidate) -> None:
    """Raises CorruptCheckpointError if an object of a checkpoint is nowhere."""
    if not candidate.is_complete:
        raise CorruptCheckpointError(f"nobody has a good copy of {', '.join(candidate.missing[:8])}")


def _held(candidate: CommitHead, files: Collection[str]) -> Held[CommitHead, str]:
    return Held(candidate, candidate.objects, files)


def objects_in(steps: Sequence[StoredStep], candidate: CommitHead) -> dict[str, int]:
    """What a folder holds of a checkpoint, with the lengths of the files (0 for the commit), the longest first."""
    here = next((one.objects for one in steps if one.step == candidate.step), {})
    if candidate not in (one.commit for one in steps):
        here.pop(COMMIT_FILE, None)  # it is that of another save of the same step
    return dict(sorted(((file, here[file]) for file in candidate.objects if file in here), key=lambda x: (-x[1], x[0])))


def verification_share(
    steps: Sequence[StoredStep], candidate: CommitHead, ranks: Sequence[int], rank: int
) -> list[str]:
    """Which objects of a folder one of its ranks is to verify: about as many bytes as each of the others.

    Args:
        steps: of the folder.
        candidate: the checkpoint.
        ranks: that use the folder.
        rank: one of them.
    """
    return list(objects_in(steps, candidate))[ranks.index(rank) :: len(ranks)]  # the longest first, so dealt in turn


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
    (found,) = candidates([[_held(candidate, verified.get(folder, {}))] for folder in roster.folders])
    require_complete(found)
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
