"""Warm memory for shards of other hosts: received into a slot, published like an own shard, and used again."""

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
from torchelastic.processes.file_locks import lock_file


class SlotReplicaStore:
    """The slots of one folder into which shards are received; may be used by several threads.

    What is on its way has a key of the caller's choice; what is published is known by its path.

    Args:
        root: the folder of the slots; shards are published on the same file system.
        disk: what touches files.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._disk = disk
        self._pool = SlotPool(root, disk=disk)
        self._lock = threading.Lock()
        self._incoming: dict[str, tuple[Stage, int]] = {}
        self._published: dict[Path, str | None] = {}  # and the digest that its sender gave

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
            digest: what `digest_at` is to return; None if the sender gave none.

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

    def digest_at(self, path: Path) -> str | None:
        """What was given to `publish`; None if the shard is not here, or was not received."""
        with self._lock:
            return self._published.get(path) if path.exists() else None

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
