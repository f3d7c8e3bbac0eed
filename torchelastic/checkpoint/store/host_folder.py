"""Folders as tiers see them: what can be read in one, and one that only the ranks of one host share.

In a private folder each shard counts as soon as it has its name, and the manifest follows: the hosts' folders together
are the checkpoint, so no single rename could publish it.

    <root>/step-000000123.e1.r5.g7/shard-00002-of-00008.shard
                                   shard-00003-of-00008.shard
                                   manifest.json     as on every other host
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchelastic.checkpoint.errors import CorruptCheckpointError, explained
from torchelastic.checkpoint.kinds import Kind, is_foreign
from torchelastic.checkpoint.policy import KeepPolicy
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord
from torchelastic.checkpoint.store.pruning import prunable_checkpoints, remove_checkpoint, remove_left_overs
from torchelastic.checkpoint.store.reading import CheckpointInfo, list_checkpoints, open_shard, read_manifest
from torchelastic.checkpoint.store.save_id import SaveId, parse_shard_file_name, shard_file_name
from torchelastic.checkpoint.store.tier import TierContext, TierEntry
from torchelastic.checkpoint.store.writing import require_stored, write_manifest


def entries_in(root: Path, *, whole: bool = False) -> list[TierEntry]:
    """What can be read in a folder of checkpoints, newest first.

    Args:
        root: the folder.
        whole: whether all shards of a checkpoint should be in this folder, so that a missing one is damage.

    Raises:
        CheckpointError: it cannot be listed.
    """
    found = [(info, _entry(info)) for info in _own_checkpoints(root)]
    return [replace(entry, damage=info.damage) if whole else entry for info, entry in found if entry is not None]


def _own_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Those that tiers have saved, newest first; `BCPState` names its folders alike."""
    return [info for info in list_checkpoints(root) if not is_foreign(info.folder, Kind.TIERED)]


def _entry(info: CheckpointInfo) -> TierEntry | None:
    sizes = _shard_sizes(info.folder)
    if info.manifest is None:
        if not sizes:
            return None
        world_size = Counter(world_size for _, world_size in sizes).most_common(1)[0][0]
        found = {rank: size for (rank, size_of_world), size in sizes.items() if size_of_world == world_size}
        damage = info.damage if (info.folder / MANIFEST_NAME).exists() else None  # else it is only not committed
        return TierEntry(info.name, world_size, tuple(sorted(found)), False, sum(found.values()), damage)
    found, damage = {}, None
    for record in info.manifest.shards:
        size_bytes = sizes.get((record.rank, info.manifest.world_size))
        if size_bytes is not None and size_bytes < record.size_bytes:
            damage = f"{info.folder / record.file} has {size_bytes} bytes of {record.size_bytes}: it was cut"
        elif size_bytes is not None:
            found[record.rank] = record.size_bytes
    return TierEntry(info.name, info.manifest.world_size, tuple(sorted(found)), True, sum(found.values()), damage)


def _is_cut(info: CheckpointInfo) -> bool:
    entry = _entry(info)
    return entry is not None and entry.damage is not None


def _shard_sizes(folder: Path) -> dict[tuple[int, int], int]:
    """The sizes of the shards' files in a folder, by rank and world size."""
    sizes = {}
    with explained("list the shards of a checkpoint", folder):
        try:
            for entry in os.scandir(folder):
                parsed = parse_shard_file_name(entry.name)
                if parsed is not None:
                    sizes[parsed] = entry.stat().st_size
        except FileNotFoundError:
            pass  # removed while we look
    return sizes


def open_in(root: Path, name: SaveId, shard_rank: int) -> ShardReader:
    """Opens one shard in a folder of checkpoints; see `Tier.open`."""
    folder = root / name.folder_name
    try:
        manifest = read_manifest(folder)
    except CorruptCheckpointError:
        return _open_alone(folder, shard_rank)
    if shard_rank >= manifest.world_size:
        raise CorruptCheckpointError(f"{folder} has {manifest.world_size} shards, and none of rank {shard_rank}")
    return open_shard(folder, manifest.shards[shard_rank])


def _open_alone(folder: Path, shard_rank: int) -> ShardReader:
    """Where the manifest is not here, the shard's own checksums have to do."""
    for rank, world_size in _shard_sizes(folder):
        if rank == shard_rank:
            return ShardReader(folder / shard_file_name(rank, world_size))
    raise CorruptCheckpointError(f"the shard of rank {shard_rank} is not in {folder}")


class HostFolder:
    """A folder of checkpoints that the ranks of one host share. Used by one thread at a time.

    Args:
        root: the folder.
        disk: what touches files.
        retire: removes one shard's file.
    """

    def __init__(self, root: Path, disk: Disk, retire: Callable[[Path], None]) -> None:
        self.root = root
        self.fence = Fence(root, disk)
        self._disk = disk
        self._retire = retire
        self._context: TierContext | None = None

    def prepare(self, context: TierContext) -> None:
        """See `Tier.prepare`."""
        self.fence.join(context.epoch, context.run_id)
        self._context = context
        remove_left_overs(self.root, context.token, self._disk)
        for info in list_checkpoints(self.root):
            remove_hidden_files(info.folder, self._disk)

    def folder_of(self, name: SaveId) -> Path:
        """Where the shards of a checkpoint lie; created if it is missing."""
        folder = self.root / name.folder_name
        self._disk.make_folder(folder)
        return folder

    def commit(self, manifest: Manifest) -> None:
        """See `Tier.commit`."""
        folder = self.folder_of(manifest.name)
        sizes = _shard_sizes(folder)
        for record in manifest.shards:
            self._require_own(folder, record, sizes, manifest.world_size)
        write_manifest(folder, manifest, self._disk)
        self._disk.sync_folder(self.root)

    def _require_own(
        self, folder: Path, record: ShardRecord, sizes: dict[tuple[int, int], int], world_size: int
    ) -> None:
        """What lies here is what the manifest says, and this rank's shard does lie here."""
        if (record.rank, world_size) in sizes:
            require_stored(folder, record)
        elif self._context is not None and record.rank == self._context.rank:
            raise CorruptCheckpointError(f"{folder} cannot be committed: the shard of rank {record.rank} is not there")

    def abandon(self, name: SaveId) -> None:
        """Removes this rank's shard."""
        for path, rank, _ in self._shards(name):
            if self._context is not None and rank == self._context.rank:
                self._retire(path)
        self._remove_if_empty(name)

    def prune(self, keep: KeepPolicy, is_ours: Callable[[Path], bool]) -> list[SaveId]:
        """Removes what the policy does not want, and what was never committed and is older than what was.

        Of a checkpoint of this group each rank removes only what it has put, since the memory of it is used again by
        the process that has put it. What older groups have left, anyone removes.

        Args:
            keep: says what stays.
            is_ours: whether this process has put a file.
        """
        infos = _own_checkpoints(self.root)
        committed = [info for info in infos if info.manifest is not None and not _is_cut(info)]
        if not committed:
            return []
        unwanted = {info.name for info in prunable_checkpoints(keep, committed)}
        unwanted |= {info.name for info in infos if info.manifest is None and info.name < committed[0].name}
        for name in sorted(unwanted):
            for path, rank, _ in self._shards(name):
                if self._may_remove(name, rank) or is_ours(path):
                    self._retire(path)
            self._remove_if_empty(name)
        return sorted(unwanted)

    def _may_remove(self, name: SaveId, rank: int) -> bool:
        return self._context is None or name.token < self._context.token or rank == self._context.rank

    def _shards(self, name: SaveId) -> list[tuple[Path, int, int]]:
        folder = self.root / name.folder_name
        sizes = _shard_sizes(folder)
        return [(folder / shard_file_name(rank, world_size), rank, world_size) for rank, world_size in sizes]

    def _remove_if_empty(self, name: SaveId) -> None:
        if not self._shards(name):
            remove_checkpoint(self.root, name, self._disk)

    def close(self) -> None:
        """Lets the folder go."""
        self.fence.release()
