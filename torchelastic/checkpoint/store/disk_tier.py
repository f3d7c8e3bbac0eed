"""Checkpoints on a disk: a folder that all hosts share, or one that each host has for itself."""

from __future__ import annotations

import os
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy, SavePolicy
from torchelastic.checkpoint.store.folder_tier import FolderTier
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import SealedShard, TierContext
from torchelastic.checkpoint.store.writing import publish_folder, remove_folder, require_stored, write_manifest

#: How much one system call writes, so that a shard of many GB is written in calls that can be interrupted.
WRITE_BYTES = 64 * 2**20


class DiskTier(FolderTier):
    """Checkpoints in a folder; a shard is written front to back, and on the disk (fsync) when `put` returns.

    Args:
        folder: of this run alone.
        keep: which checkpoints stay.
        every: how rarely it takes part; None: in each save.
        shared: whether all hosts see the same folder (NFS, Lustre; or there is only one host). Then a checkpoint is
            published by one rename. If not, each host keeps the shards of its own ranks.
        name: for logs and metrics.
        disk: what touches files.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: KeepPolicy | None = None,
        every: SavePolicy | None = None,
        *,
        shared: bool = True,
        name: str = "disk",
        disk: Disk = REAL_DISK,
    ) -> None:
        keep = keep if keep is not None else KeepLast(3)
        super().__init__(folder, keep, every, name=name, is_shared=shared, disk=disk)

    def claim(self, run_id: str, owner: str, at_least: int) -> int:
        """See `Tier`."""
        return self._fence.claim(run_id, owner, at_least=at_least) if self.is_shared else at_least

    def prepare(self, context: TierContext) -> None:
        """See `Tier`."""
        if not self.is_shared:
            super().prepare(context)
            return
        self._fence.join(context.epoch, context.run_id)
        self._fence.advance(context.epoch, context.round)

    def put(self, shard: SealedShard) -> ShardRecord:
        """See `Tier`; in a shared folder all ranks fill one hidden folder."""
        record = shard.record
        pieces = [shard.data[begin : begin + WRITE_BYTES] for begin in range(0, record.size_bytes, WRITE_BYTES)]
        self._fence.check(*shard.name.token)
        folder = self._root / (shard.name.staging_name if self.is_shared else shard.name.folder_name)
        self._disk.make_folder(folder)
        try:
            write_whole(folder / record.file, pieces, self._disk)
        except CheckpointError:
            self._fence.check(*shard.name.token)  # whoever raised it has taken the folder away: say so
            raise
        return record

    def commit(self, manifest: Manifest) -> None:
        """See `Tier`; in a shared folder by one rename, see `publish_folder`."""
        if not self.is_shared:
            super().commit(manifest)
            return
        name = manifest.name
        staging, target = self._root / name.staging_name, self._root / name.folder_name
        if target.exists():
            raise CheckpointError(
                f"the checkpoint {target} exists already, and nothing is overwritten: count generation up"
            )
        self._fence.check(*name.token)
        for record in manifest.shards:
            require_stored(staging, record)
        try:
            write_manifest(staging, manifest, self._disk)
            remove_hidden_files(staging, self._disk)
            self._fence.check(*name.token)
            # From here the fence may still rise. Whoever raises it takes older staging folders away: no rename works.
            publish_folder(self._root, name, self._disk)
        except CheckpointError:
            if not (target / MANIFEST_NAME).exists():
                self._fence.check(*name.token)  # the folder was taken away: say why
            raise
        self._disk.sync_folder(self._root)

    def abandon(self, name: SaveId) -> None:
        """See `Tier`; a rank that is still writing its shard into a shared folder gets an error."""
        if self.is_shared:
            remove_folder(self._root, name.staging_name, self._disk)
        else:
            super().abandon(name)

    def _delete_one(self, name: SaveId) -> None:
        if self.is_shared:
            remove_folder(self._root, name.folder_name, self._disk)
        else:
            super()._delete_one(name)

    def _delete_file(self, path: Path) -> None:
        self._disk.remove(path)
