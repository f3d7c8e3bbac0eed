"""Shards of other ranks in this host's memory: received into a warm slot, published like the rank's own."""

from __future__ import annotations

from pathlib import Path

from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.slot_replica_store import SlotReplicaStore, sealed_bytes
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, parse_shard_file_name, shard_file_name


class ReceivedShards(SlotReplicaStore):
    """A `ReplicaStore` on a folder of checkpoints in memory; may be used by several threads.

    The id of an object is the text of its `ShardId`; an object is the whole shard.

    Args:
        root: the folder.
        disk: what touches files.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        super().__init__(root, disk)
        self._root = root

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`."""
        ShardId.parse(object_id)
        self._disk.make_folder(self._root)  # somebody may have removed it, with all that was in it
        return self.take(object_id, size_bytes)

    def received(self, object_id: str, digest: str | None) -> None:
        """See `ReplicaStore`, and `SlotReplicaStore.publish`."""
        self.publish(object_id, self._path_of(object_id), digest)

    def source(self, object_id: str) -> memoryview | None:
        """The bytes of a shard that is here, whoever put it; None if it is not."""
        return sealed_bytes(self._path_of(object_id))

    def digest(self, object_id: str) -> str | None:
        """What was given to `received`; None if the shard is not here, or is this host's own."""
        return self.digest_at(self._path_of(object_id))

    def ids(self) -> list[str]:
        """All shards that are here, whoever put them."""
        found = []
        for path in self._root.glob("step-*/shard-*.shard"):
            name, parsed = SaveId.find(path.parent.name), parse_shard_file_name(path.name)
            if name is not None and parsed is not None:
                found.append(str(ShardId(name, *parsed)))
        return sorted(found)

    def _path_of(self, object_id: str) -> Path:
        shard = ShardId.parse(object_id)
        return self._root / shard.name.folder_name / shard_file_name(shard.rank, shard.world_size)
