"""Shards of other ranks in this host's memory: received into a warm slot, published like the rank's own, used again."""

from __future__ import annotations

import copy
import fcntl
import mmap
import os
import secrets
import threading
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, Entry, Header, decode_preamble
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.store.reading import is_whole
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, parse_shard_file_name, shard_file_name
from torchelastic.checkpoint.store.writing import make_place, remove_whatever
from torchelastic.processes.file_locks import lock_file

Shelf = TypeVar("Shelf", bound="ReceivedShards")


class ReceivedShards:
    """A `ReplicaStore` on a folder of checkpoints in memory; may be used by several threads.

    The id of an object is the text of its `ShardId`; an object is the whole shard. What is published is known by its
    path.

    Args:
        root: the folder.
        disk: what touches files.

    Attributes:
        root: the folder.
        disk: as given.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._pool = SlotPool(root, disk=disk)
        self._lock = threading.Lock()
        self._incoming: dict[str, tuple[Stage, int]] = {}
        self._published: dict[Path, str | None] = {}  # and the digest that its sender gave
        self._fetch = ""

    def fetching(self: Shelf) -> Shelf:
        """The same for one shard that this process has asked for; others may push it, or fetch it too, meanwhile."""
        shelf = copy.copy(self)
        shelf._fetch = f"{secrets.token_hex(4)}:"
        return shelf

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaStore`. What was begun under this name is abandoned."""
        ShardId.parse(object_id)
        self.abort(object_id)
        stage = self._pool.take(_row_of(size_bytes))
        with self._lock:
            self._incoming[self._fetch + object_id] = (stage, size_bytes)
        return stage.slot.view()[:size_bytes]

    def received(self, object_id: str, digest: str | None) -> None:
        """See `ReplicaStore`. What has that name already stays, being the same shard, unless it is not whole.

        Args:
            object_id: as given to `destination`.
            digest: what `digest` is to return; None if the sender gave none.

        Raises:
            CorruptCheckpointError: what was received is no whole shard.
            CheckpointError: it cannot be published.
        """
        path = self.path_of(object_id)
        with self._lock:
            stage, size_bytes = self._incoming.pop(self._fetch + object_id)
            try:
                if _shard_bytes(stage.slot.view()[:size_bytes]) != size_bytes:
                    raise CorruptCheckpointError(f"what was received as {path.name} is longer than its shard")
                if not is_whole(path, ShardId.parse(object_id).rank):
                    make_place(path.parent, self.disk)
                    remove_whatever(path, self.disk)
                    self._pool.publish(stage, path)
                    self._published[path] = digest
                    return
            except BaseException:
                self._pool.release(stage)
                raise
            self._pool.release(stage)

    def abort(self, object_id: str) -> None:
        """See `ReplicaStore`."""
        with self._lock:
            stage, _ = self._incoming.pop(self._fetch + object_id, (None, 0))
        if stage is not None:
            self._pool.release(stage)

    def source(self, object_id: str) -> memoryview | None:
        """The bytes of a shard that is here, whoever put it; None if it is not."""
        return sealed_bytes(self.path_of(object_id))

    def digest(self, object_id: str) -> str | None:
        """What was given to `received`; None if the shard is not here, or is this host's own."""
        path = self.path_of(object_id)
        with self._lock:
            return self._published.get(path) if is_whole(path, ShardId.parse(object_id).rank) else None

    def ids(self) -> list[str]:
        """All shards that are here, whoever put them."""
        found = []
        for path in self.root.glob("step-*/shard-*.shard"):
            name, parsed = SaveId.find(path.parent.name), parse_shard_file_name(path.name)
            if name is not None and parsed is not None:
                found.append(str(ShardId(name, *parsed)))
        return sorted(found)

    def path_of(self, object_id: str) -> Path:
        """Where a shard lies, or would."""
        shard = ShardId.parse(object_id)
        return self.root / shard.name.folder_name / shard_file_name(shard.rank, shard.world_size)

    def is_warm(self, size_bytes: int) -> bool:
        """Whether so many bytes can be received without new memory."""
        return self._pool.is_warm(_row_of(size_bytes))

    def delete(self, path: Path) -> bool:
        """Removes a shard if it was received here, and keeps its slot for the next; false if it is not ours.

        Raises:
            CheckpointError: it cannot be removed.
        """
        if not self.holds(path):
            return False
        self._pool.delete(path)
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
                self._pool.release(stage)
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
