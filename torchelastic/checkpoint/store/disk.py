"""Checkpoints on a disk: a folder that all hosts share, or one that each host has for itself."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torchelastic.checkpoint import store
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.kinds import Kind, is_foreign, require_own_folder
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy, SavePolicy
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.store.host_folder import HostFolder, entries_in, open_in
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import SealedShard, Tier, TierContext, TierEntry


class DiskTier(Tier):
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
        if not os.fspath(folder):
            raise ValueError("the folder of the disk tier is empty: name the folder that shall hold the checkpoints")
        self._root = Path(folder).absolute()
        self.name = name
        self.is_shared = shared
        self.keep = keep if keep is not None else KeepLast(3)
        self.every = every
        self.where = str(self._root)
        self._disk = disk
        self._host = HostFolder(self._root, disk, disk.remove)
        self._fence = self._host.fence

    def require_own(self) -> None:
        """See `Tier`."""
        require_own_folder(self._root, Kind.TIERED)

    def known_epoch(self, run_id: str) -> int:
        """See `Tier`."""
        return self._fence.known_epoch(run_id)

    def claim(self, run_id: str, owner: str, at_least: int) -> int:
        """See `Tier`."""
        return self._fence.claim(run_id, owner, at_least=at_least) if self.is_shared else at_least

    def prepare(self, context: TierContext) -> None:
        """See `Tier`."""
        if not self.is_shared:
            self._host.prepare(context)
            return
        self._fence.join(context.epoch, context.run_id)
        self._fence.advance(context.epoch, context.round)

    def put(self, shard: SealedShard) -> ShardRecord:
        """See `Tier`."""
        if not self.is_shared:
            folder = self._host.folder_of(shard.name)
            return store.write_shard(folder, shard.rank, shard.world_size, shard.data, self._disk)
        self._fence.check(*shard.name.token)
        folder = store.begin(self._root, shard.name, self._disk)
        try:
            return store.write_shard(folder, shard.rank, shard.world_size, shard.data, self._disk)
        except CheckpointError:
            self._fence.check(*shard.name.token)  # whoever raised it has taken the folder away: say so
            raise

    def commit(self, manifest: Manifest) -> None:
        """See `Tier`."""
        if self.is_shared:
            store.commit(self._root, manifest, fence=self._fence, disk=self._disk)
        else:
            self._host.commit(manifest)

    def abandon(self, name: SaveId) -> None:
        """See `Tier`."""
        if self.is_shared:
            store.abandon(self._root, name, self._disk)
        else:
            self._host.abandon(name)

    def inventory(self) -> list[TierEntry]:
        """See `Tier`."""
        return entries_in(self._root, whole=self.is_shared)

    def open(self, name: SaveId, shard_rank: int) -> ShardReader:
        """See `Tier`."""
        return open_in(self._root, name, shard_rank)

    def prune(self) -> list[SaveId]:
        """See `Tier`."""
        if self.is_shared:
            return store.prune(self._root, self.keep, self._disk, spare=partial(is_foreign, own=Kind.TIERED))
        return self._host.prune(self.keep, lambda _: False)

    def close(self) -> None:
        """See `Tier`."""
        self._host.close()
