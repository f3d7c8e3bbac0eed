"""Checkpoints on a disk: a folder that all hosts share, or one that each host has for itself."""

from __future__ import annotations

import os
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy, SavePolicy
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store.folder import FolderTier
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.pruning import abandon, prune
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import SealedShard, TierContext
from torchelastic.checkpoint.store.writing import begin, commit, write_shard


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
        """See `Tier`."""
        if not self.is_shared:
            folder = self._folder_of(shard.name)
            return write_shard(folder, shard.rank, shard.world_size, shard.data, self._disk)
        self._fence.check(*shard.name.token)
        folder = begin(self._root, shard.name, self._disk)
        try:
            return write_shard(folder, shard.rank, shard.world_size, shard.data, self._disk)
        except CheckpointError:
            self._fence.check(*shard.name.token)  # whoever raised it has taken the folder away: say so
            raise

    def commit(self, manifest: Manifest) -> None:
        """See `Tier`."""
        if self.is_shared:
            commit(self._root, manifest, fence=self._fence, disk=self._disk)
        else:
            super().commit(manifest)

    def abandon(self, name: SaveId) -> None:
        """See `Tier`."""
        if self.is_shared:
            abandon(self._root, name, self._disk)
        else:
            super().abandon(name)

    def prune(self) -> list[SaveId]:
        """See `Tier`."""
        if self.is_shared:
            return prune(self._root, self.keep, self._disk, kind=self.kind)
        return super().prune()

    def _retire(self, path: Path) -> None:
        self._disk.remove(path)
