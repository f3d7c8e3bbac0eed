"""Which checkpoint can be recovered, who fetches what from whom, and which copies are missing then. Pure.

Every rank computes the same from what all of them have told each other. A *folder* is one container on one machine,
which the ranks there share; a *host* is what is lost at once, and may have several folders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.memory.commit import CommitHead, StoredStep
from torchelastic.checkpoint.memory.names import COMMIT_FILE
from torchelastic.checkpoint.replication.exchange import retrieve_plan
from torchelastic.checkpoint.replication.placement import missing_copies


@dataclass(frozen=True)
class Roster:
    """Where the ranks are.

    Attributes:
        hosts: of each rank; those with the same host are lost together.
        folders: of each rank, what identifies the folder that it uses.
    """

    hosts: tuple[str, ...]
    folders: tuple[str, ...]

    def ranks_of(self, folder: str) -> tuple[int, ...]:
        """The ranks that use a folder; the first of them acts for all."""
        return tuple(rank for rank, other in enumerate(self.folders) if other == folder)

    @property
    def sharers(self) -> dict[str, tuple[int, ...]]:
        """`ranks_of` all folders, in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, folder in enumerate(self.folders):
            found.setdefault(folder, []).append(rank)
        return {folder: tuple(ranks) for folder, ranks in found.items()}


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


def candidates(listings: Mapping[str, Sequence[StoredStep]]) -> list[CommitHead]:
    """The checkpoints of which there is a commit, newest first; by folder what is there."""
    return sorted({one.commit for steps in listings.values() for one in steps if one.commit}, reverse=True)


def objects_in(steps: Sequence[StoredStep], candidate: CommitHead) -> dict[str, int]:
    """What a folder holds of a checkpoint, with the lengths of the files (0 for the commit), the longest first."""
    here = next((one.objects for one in steps if one.step == candidate.step), {})
    if candidate not in (one.commit for one in steps):
        here.pop(COMMIT_FILE, None)  # it is that of another save of the same step
    return dict(sorted(((file, here[file]) for file in candidate.objects if file in here), key=lambda x: (-x[1], x[0])))


def missing(candidate: CommitHead, held: Mapping[str, Collection[str]]) -> list[str]:
    """The objects of a checkpoint that are in no folder.

    Args:
        candidate: the checkpoint.
        held: its objects by folder.
    """
    there = {file for files in held.values() for file in files}
    return [file for file in candidate.objects if file not in there]


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
    load = dict.fromkeys(ranks, 0)
    shares: dict[int, list[str]] = {each: [] for each in ranks}
    for file, size_bytes in objects_in(steps, candidate).items():
        chosen = min(load, key=lambda each: (load[each], each))
        load[chosen] += size_bytes + 1
        shares[chosen].append(file)
    return shares[rank]


def recovery_plan(candidate: CommitHead, verified: Verified, roster: Roster, copies: int = 1) -> RecoveryPlan | None:
    """Plans the recovery of a checkpoint: every folder gets the commit, and the shards of its ranks that exist now.

    Shards of ranks that do not exist any more stay where they are; those of new ranks do not exist. Who gives what is
    spread over the holders.

    Args:
        candidate: the checkpoint.
        verified: its good copies.
        roster: the ranks that are there now.
        copies: on how many other hosts each shard is to be in the end; fewer if there are fewer.

    Returns:
        The plan; None if an object is held by nobody.
    """
    if missing(candidate, verified):
        return None
    sizes = {file: size_bytes for files in verified.values() for file, size_bytes in files.items()}
    available = {rank: list(verified.get(folder, {})) for rank, folder in enumerate(roster.folders)}
    own = {rank: next(iter(candidate.files_of([rank])), None) for rank in available}
    first = {ranks[0]: COMMIT_FILE for ranks in roster.sharers.values()}
    fetches = []
    for wanted in (own, first):
        plan = retrieve_plan(available, wanted, size_bytes=sizes)
        for entry in plan.entries:
            if entry.sender != entry.receiver:
                holders = plan.candidates(entry.receiver, entry.id_)
                fetches.append(Fetch(entry.id_, entry.receiver, holders, sizes[entry.id_]))
    holders_of = {file: tuple(rank for rank in available if file in available[rank]) for file in candidate.objects}
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
