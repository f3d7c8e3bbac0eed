"""The folders of a group's hosts: how a shard comes from one into another, and lost replicas are made again.

What is fetched counts like what was saved there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import HIDDEN
from torchelastic.checkpoint.format.stage import tensors_of
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import Transferred, pull_into
from torchelastic.checkpoint.replicas.replication_errors import ReplicationError
from torchelastic.checkpoint.replicas.topology import root_id
from torchelastic.checkpoint.store.folder_tier import FolderTier
from torchelastic.checkpoint.store.manifest import decode_manifest, encode_manifest
from torchelastic.checkpoint.store.memory_tier import MemoryTier
from torchelastic.checkpoint.store.owner import locked
from torchelastic.checkpoint.store.reading import require_shard
from torchelastic.checkpoint.store.restore_plan import ShardSource, lost_copies, sources_elsewhere
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, shard_file_name
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: Fetches a shard from where it is; see `ReplicaClient.pull`.
Pull = Callable[[ShardId, ShardSource, Destination], Transferred]
#: Of shards that lie here and are of no use: why.
Bad = Mapping[ShardId, CheckpointError]

Got = TypeVar("Got")

#: For how long another process of this host is waited for that fetches the same shard.
FETCHING_ELSEWHERE_S = 600.0


@dataclass(frozen=True)
class GroupFolders:
    """Those of one group, as one of its ranks sees them.

    Attributes:
        tier: in the folder of this host.
        rank: of this process.
        roots: of each rank, what identifies the folder that it uses; ranks of a host may share one.
        hosts: of each rank; those of one host are lost together.
        partners_of: of each rank, who keeps replicas of its shards; empty if nobody does.
        pull: asks one source.
    """

    tier: MemoryTier
    rank: int
    roots: Sequence[str]
    hosts: Sequence[str]
    partners_of: Sequence[Collection[int]]
    pull: Pull

    def elsewhere(self, sources: Mapping[int, Collection[ShardSource]], shard: int) -> list[ShardSource]:
        """Where a shard can be read but in this rank's folder, nearest first; pure."""
        return sources_elsewhere(sources, shard, self.rank, self.roots)

    def lost(self, sources: Mapping[int, Collection[ShardSource]], *, own_too: bool) -> dict[int, list[int]]:
        """See `lost_copies`; pure, alike on all ranks."""
        return lost_copies(sources, self.roots, self.hosts, self.partners_of, own_too=own_too)

    def fetch(
        self, shard: ShardId, sources: Sequence[ShardSource], *, instead_of: CheckpointError | None = None
    ) -> int:
        """Fetches a shard into the folder of this host, where it counts like one that was put there. From any thread.

        One process of a host fetches it; the others find it there. The sources are tried until a copy is good: a
        holder's disk may have gone bad since it verified its copy.

        Args:
            shard: which.
            sources: where it may be, best first.
            instead_of: why what lay here under its name is of no use; it is replaced. None: it is as good, if it is
                whole.

        Returns:
            How many bytes came; 0 if it was there by now.

        Raises:
            CorruptCheckpointError: nobody gives it, or all copies are damaged.
            CheckpointError: there is no room for it, or it cannot replace what lay there.
        """
        tier = self.tier

        def take(source: ShardSource) -> int:
            return pull_into(tier.shelf.fetching(), str(shard), partial(self.pull, shard, source), check)

        def check(view: memoryview) -> None:
            where = f"the copy of {shard}"
            header, _ = tensors_of(torch.frombuffer(view, dtype=torch.uint8), where)
            require_shard(shard, header.meta, where)
            tier.remove_damaged(shard)  # nobody would have asked if what lies there were of use

        root, disk = tier.shelf.root, tier.shelf.disk
        lock = root / f"{HIDDEN}fetch-{shard.name}.{shard_file_name(shard.rank, shard.world_size)}"
        try:
            disk.make_folder(root)  # somebody may have removed it, with all that was in it
            with locked(lock, FETCHING_ELSEWHERE_S):
                is_wanted = instead_of is not None or not tier.has_whole(shard)
                came = first_good_copy(shard, sources, take) if is_wanted else 0
                disk.remove(lock)  # who waits for it has it open
                return came
        except CheckpointError as error:
            if instead_of is None:
                raise
            kind = CorruptCheckpointError if isinstance(error, CorruptCheckpointError) else CheckpointError
            raise kind(f"{instead_of}; and on other hosts: {error}") from error

    def make_again(
        self,
        shards: Sequence[ShardId],
        sources: Mapping[int, Collection[ShardSource]],
        lost: Iterable[int],
        *,
        bad: Bad = MappingProxyType({}),
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Makes copies again that were lost; one that cannot be made costs a warning, and the next save makes its own.

        Args:
            shards: all of the checkpoint.
            sources: where they are.
            lost: which of them this rank fetches.
            bad: of shards that are whole here.
            is_wanted: whether the checkpoint still is the one to keep.

        Returns:
            Whether they are there, or not wanted any more.
        """
        failed = False
        for shard in [shards[one] for one in lost]:
            if not is_wanted():
                break
            try:
                came = self.fetch(shard, self.elsewhere(sources, shard.rank), instead_of=bad.get(shard))
            except Exception as error:  # noqa: BLE001 - training goes on
                if not is_wanted():
                    break
                failed = True
                publish_metric("torchelastic", "checkpoint.replication.failures", 1)
                log.warning("there is no new copy of %s: %s", shard, str(error) or type(error).__name__)
            else:
                publish_metric("torchelastic", "checkpoint.replication.remade.bytes", came)
        return not failed


def first_good_copy(shard: object, sources: Sequence[ShardSource], take: Callable[[ShardSource], Got]) -> Got:
    """What `take` returns for the first source that has a good copy; the others are named in warnings.

    Args:
        shard: for people.
        sources: best first.
        take: fetches and checks one. A `CorruptCheckpointError` or `ReplicationError` means: try the next; anything
            else would be no better there.

    Raises:
        CorruptCheckpointError: no source has a good copy; tells why of each.
    """
    failures = []
    for source in sources:
        try:
            return take(source)
        except (CorruptCheckpointError, ReplicationError) as error:
            failures.append(f"{source}: {error}")
            log.warning("%s is of no use at %s: %s", shard, source, error)
    raise CorruptCheckpointError(f"no good copy of {shard} is left ({'; '.join(failures) or 'nobody holds one'})")


def folder_id(tier: FolderTier, rank: int) -> str:
    """Equal for the ranks that share the folder of a tier that each host has for itself."""
    try:
        return root_id(tier.root)
    except OSError:  # nobody could prepare it
        return f"rank {rank}"


def verify(tier: MemoryTier, shards: Iterable[ShardId]) -> list[int]:
    """Compares shards that lie in a tier with their checksums; what is damaged is removed, with a warning.

    What cannot be read now stays: no other copy may be left, and somebody may mend that.

    Args:
        tier: where they are.
        shards: which, all of one save.

    Returns:
        The ranks of the good ones.
    """
    good = []
    for shard in shards:
        try:
            with tier.open(shard.name, shard.rank) as opened:
                opened.verify()
                good.append(shard.rank)
        except CorruptCheckpointError as error:
            log.warning("%s is of no use and is removed: %s", shard, error)
            tier.remove_damaged(shard)
        except CheckpointError as error:
            log.warning("%s cannot be read: %s", shard, error)
    return good


def give_manifest(
    tier: FolderTier, save: SaveId, rank: int, run_on_all: Callable[[Callable[[], Any]], list[Any]]
) -> bool:
    """Has every folder of a group get the manifest of a checkpoint, if one of them has it. Collective.

    Where it cannot be written, a warning says so: what lies there counts for less, and can still be read.

    Args:
        tier: of this rank; each host has its own.
        save: which checkpoint; it was restored.
        rank: of this process.
        run_on_all: has each rank do something, and returns what each of them returned.

    Returns:
        Whether some folder has it.
    """

    def look() -> list[Any]:
        return [folder_id(tier, rank), tier.manifest_of(save) is not None]

    def report() -> str | None:
        manifest = tier.manifest_of(save) if rank == giver else None
        return None if manifest is None else encode_manifest(manifest).decode()

    looked = run_on_all(look)
    folders, has = [folder for folder, _ in looked], [has_it for _, has_it in looked]
    if not any(has) and rank == 0:
        log.warning("%s has no manifest on any host: it can be read, and counts for nothing when there is more", save)
    if all(has) or not any(has):
        return any(has)
    giver = has.index(True)
    told = run_on_all(report)[giver]
    if told is not None and not has[rank] and folders.index(folders[rank]) == rank:
        try:
            tier.adopt(decode_manifest(told.encode()))
        except CheckpointError as error:
            log.warning("%s has no manifest on this host, and gets none: %s", save, error)
    return True
