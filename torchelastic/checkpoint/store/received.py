"""Shards of other ranks in this host's memory: received into a warm slot, published like the rank's own, used again."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from pathlib import Path

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.header import PREAMBLE_BYTES, Entry, Header, decode_preamble
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, parse_shard_file_name, shard_file_name
from torchelastic.processes.file_locks import lock_file


class ReceivedShards:
    """A `ReplicaStore` on a folder of checkpoints in memory; may be used by several threads.

    The id of an object is the text of its `ShardId`; an object is the whole shard. What is on its way has a key, as a
    rule the same; what is published is known by its path.

    Args:
        root: the folder.
        disk: what touches files.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._pool = SlotPool(root, disk=disk)
        self._lock = threading.Lock()
        self._incoming: dict[str, tuple[Stage, int]] = {}
        self._published: dict[Path, str | None] = {}  # and the digest that its sender gave

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`."""
        ShardId.parse(object_id)
        self._disk.make_folder(self._root)  # somebody may have removed it, with all that was in it
        return self.take(object_id, size_bytes)

    def received(self, object_id: str, digest: str | None) -> None:
        """See `ReplicaStore`, and `publish`."""
        self.publish(object_id, self._path_of(object_id), digest)

    def source(self, object_id: str) -> memoryview | None:
        """The bytes of a shard that is here, whoever put it; None if it is not."""
        return sealed_bytes(self._path_of(object_id))

    def digest(self, object_id: str) -> str | None:
        """What was given to `received`; None if the shard is not here, or is this host's own."""
        path = self._path_of(object_id)
        with self._lock:
            return self._published.get(path) if path.exists() else None

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

    def is_warm(self, size_bytes: int) -> bool:
        """Whether so many bytes can be received without new memory."""
        return self._pool.is_warm(_row_of(size_bytes))

    def take(self, key: str, size_bytes: int) -> memoryview:
        """Where so many bytes are to be received; what was begun under this key is abandoned.

        Raises:
            CheckpointError: there is no room for them.
        """
        self.abandon(key)
        stage = self._pool.take(_row_of(size_bytes))
        with self._lock:
            self._incoming[key] = (stage, size_bytes)
        return stage.slot.view()[:size_bytes]

    def publish(self, key: str, path: Path, digest: str | None) -> None:
        """Gives what was received its name, or abandons it. What has that name already stays, being the same shard.

        Args:
            key: as given to `take`.
            path: of the shard from now on.
            digest: what `digest` is to return; None if the sender gave none.

        Raises:
            CorruptCheckpointError: what was received is no whole shard.
            CheckpointError: it cannot be published.
        """
        with self._lock:
            stage, size_bytes = self._incoming.pop(key)
            try:
                if _shard_bytes(stage.slot.view()[:size_bytes]) != size_bytes:
                    raise CorruptCheckpointError(f"what was received as {path.name} is longer than its shard")
                if not path.exists():
                    self._disk.make_folder(path.parent)
                    self._pool.publish(stage, path)
                    self._published[path] = digest
                    return
            except BaseException:
                self._pool.give_back(stage)
                raise
            self._pool.give_back(stage)

    def abandon(self, key: str) -> None:
        """What is on its way under this key, if anything, will not be completed."""
        with self._lock:
            stage, _ = self._incoming.pop(key, (None, 0))
        if stage is not None:
            self._pool.give_back(stage)

    def retire(self, path: Path) -> bool:
        """Removes a shard if it was received here, and keeps its slot for the next; false if it is not ours.

        Raises:
            CheckpointError: it cannot be removed.
        """
        if not self.holds(path):
            return False
        self._pool.retire(path)
        with self._lock:
            self._published.pop(path, None)
        return True

    def holds(self, path: Path) -> bool:
        """Whether this is a shard that was received here."""
        with self._lock:
            return path in self._published

    def close(self) -> None:
        """Gives all memory back; published files stay, hidden ones go."""
        self._pool.close()
        with self._lock:
            for stage, _ in self._incoming.values():
                self._pool.give_back(stage)
            self._incoming.clear()
            self._published.clear()


def _row_of(size_bytes: int) -> Header:
    """The layout of so many bytes, for a pool: it counts what it has to have room for."""
    return Header(None, (Entry.of_bytes("shard", size_bytes),))


def _shard_bytes(view: memoryview) -> int:
    """How long the shard is that begins there. Raises: CorruptCheckpointError if it is none, or not all of one."""
    return decode_preamble(bytes(view[:PREAMBLE_BYTES])).shard_bytes(view.nbytes)


def sealed_bytes(path: Path) -> memoryview | None:
    """The bytes of a published shard, without what its slot has behind them; None if there is none, or not all of it.

    As long as the view lives the file stays locked (the map keeps the open file), so nobody writes into its slot.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        lock_file(descriptor, fcntl.LOCK_SH)
        view = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        return view[: _shard_bytes(view)]
    except (OSError, ValueError):  # being removed or written, damaged, or empty
        return None
    finally:
        os.close(descriptor)
