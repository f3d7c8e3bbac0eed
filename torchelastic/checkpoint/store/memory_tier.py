"""The freshest tier: this host's tmpfs. A sealed slot only gets a name there, so storing it costs nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, is_full
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy, SavePolicy
from torchelastic.checkpoint.store.folder_tier import FolderTier
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.reading import is_whole
from torchelastic.checkpoint.store.received_shards import ReceivedShards
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import SealedShard
from torchelastic.checkpoint.store.writing import make_place, remove_whatever

log = logging.getLogger(__name__)


class MemoryTier(FolderTier):
    """Checkpoints in a folder on tmpfs, which survive every process of this host, but not the host.

    Each host has its own; the ranks of a host share it. It also takes shards of other hosts' ranks (`shelf`).

    Args:
        folder: on tmpfs, for example below /dev/shm; of this run alone.
        keep: which checkpoints stay. Each costs this host's shards of memory, and one more is needed for saving.
        every: how rarely it takes part; None: in each save.
        name: for logs and metrics.
        disk: what touches files.

    Attributes:
        pool: the slots. A stage that was taken and will not be put is given back to it.
        shelf: where replicas of other ranks' shards are received; see `ReplicaServer`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: KeepPolicy | None = None,
        every: SavePolicy | None = None,
        *,
        name: str = "memory",
        disk: Disk = REAL_DISK,
    ) -> None:
        keep = keep if keep is not None else KeepLast(1)
        super().__init__(folder, keep, every, name=name, is_shared=False, disk=disk)
        self.pool = SlotPool(self._root, disk=disk)
        self.shelf = ReceivedShards(self._root, disk)

    def known_epoch(self, run_id: str) -> int:
        """See `Tier`. A folder that is full is entered by the first `put` that finds room, and costs no other tier."""
        try:
            return super().known_epoch(run_id)
        except CheckpointError as error:
            if not is_full(error):
                raise
            log.warning("nothing is saved in the %s tier until %s has room: %s", self.name, self._root, error)
            return self._fence.known_epoch(run_id)

    def stage(self, header: Header) -> Stage:
        """A slot to copy tensors of this layout into, after `prepare`. Give it to `put`, or to `pool.release`.

        Raises:
            CheckpointError: there is no room for a new one.
        """
        return self.pool.take(header)

    def put(self, shard: SealedShard) -> ShardRecord:
        """Publishes the stage as it is; copies only what lies in no stage of this tier. See `Tier`."""
        record = shard.record
        self._hold_again()
        path = self._folder_of(shard.name) / record.file
        if shard.stage is not None and self._is_ours(shard.stage):
            self.pool.publish(shard.stage, path)
        else:
            self.receive(shard.name, shard.rank, shard.world_size, shard.data)
        return record

    def _is_ours(self, stage: Stage) -> bool:
        return stage.slot.path is not None and stage.slot.path.parent == self._root

    def receive(self, name: SaveId, rank: int, world_size: int, data: memoryview) -> None:
        """Copies the whole shard of any rank into this host's memory, where it counts like one that was put here.

        Raises:
            CorruptCheckpointError: it is no whole shard.
            CheckpointError: there is no room for it.
        """
        shard_id = str(ShardId(name, rank, world_size))
        self.shelf.destination(shard_id, data.nbytes)[:] = data
        self.shelf.received(shard_id, None)

    def path_of(self, shard: ShardId) -> Path:
        """Where a shard lies, or would."""
        return self._root / str(shard)

    def has_whole(self, shard: ShardId) -> bool:
        """Whether a shard lies here; see `is_whole`. From any thread."""
        return is_whole(self.path_of(shard), shard.rank)

    def remove_damaged(self, shard: ShardId) -> None:
        """Removes a shard that proved damaged, also where another process holds it: nobody can use it.

        Another one can be put there then, whatever lay there.
        """
        path = self.path_of(shard)
        make_place(path.parent, self._disk)
        if os.path.isfile(path):  # noqa: PTH113 - that of Path raises where a folder may not be read
            self._delete_file(path)
        remove_whatever(path, self._disk)

    def _may_remove(self, name: SaveId, rank: int, path: Path) -> bool:
        return super()._may_remove(name, rank, path) or self.pool.holds(path) or self.shelf.holds(path)

    def _delete_file(self, path: Path) -> None:
        if not self.shelf.delete(path):
            self.pool.delete(path)

    def close(self) -> None:
        """See `Tier`."""
        self.shelf.close()
        self.pool.close()
        super().close()
