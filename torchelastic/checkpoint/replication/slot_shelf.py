"""Warm memory for shards of other hosts: received into a slot, published like an own shard, and used again."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.shards.disk import Disk, lock_file
from torchelastic.checkpoint.shards.slot import Slot
from torchelastic.checkpoint.shards.writing import hidden_path
from torchelastic.checkpoint.store.reading import record_of


class SlotShelf:
    """The slots of one folder into which shards are received; may be used by several threads.

    What is on its way has a key of the caller's choice; what is published is known by its path.

    Args:
        root: the folder of the slots; shards are published on the same file system.
        disk: what touches files.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._incoming: dict[str, tuple[Slot, int]] = {}
        self._published: dict[Path, Slot] = {}
        self._digests: dict[Path, str] = {}

    def is_warm(self, size_bytes: int) -> bool:
        """Whether so many bytes can be received without new memory."""
        with self._lock:
            return any(slot.capacity_bytes >= size_bytes for slot in self._free)

    def take(self, key: str, size_bytes: int) -> memoryview:
        """Where so many bytes are to be received; what was begun under this key is abandoned.

        Raises:
            CheckpointError: there is no room for them.
        """
        self.abandon(key)
        with self._lock:
            roomy = [slot for slot in self._free if slot.capacity_bytes >= size_bytes]
            slot = min(roomy, key=lambda slot: slot.capacity_bytes) if roomy else self._new_slot(size_bytes)
            if roomy:
                self._free.remove(slot)
            self._incoming[key] = (slot, size_bytes)
            return slot.view()[:size_bytes]

    def publish(self, key: str, path: Path, rank: int, digest: str | None) -> None:
        """Gives what was received its name. What has that name already stays, being the same shard.

        Args:
            key: as given to `take`.
            path: of the shard from now on.
            rank: whose shard it is; for errors.
            digest: what `digest` is to return; None if the sender gave none.

        Raises:
            CorruptCheckpointError: what was received is no whole shard.
            CheckpointError: it cannot be published.
        """
        with self._lock:
            slot, size_bytes = self._incoming[key]
            if record_of(slot.view()[:size_bytes], rank, path.name).size_bytes != size_bytes:
                raise CorruptCheckpointError(f"what was received as {path.name} has {size_bytes} bytes, and should not")
            if path.exists():
                self._free.append(slot)
            else:
                self._disk.make_folder(path.parent)
                slot.publish(path)
                self._published[path] = slot
            del self._incoming[key]
            if digest is not None:
                self._digests[path] = digest

    def abandon(self, key: str) -> None:
        """What is on its way under this key, if anything, will not be completed."""
        with self._lock:
            slot, _ = self._incoming.pop(key, (None, 0))
            if slot is not None:
                self._free.append(slot)

    def digest(self, path: Path) -> str | None:
        """What was given to `publish`; None if the shard is not here, or was not received."""
        with self._lock:
            return self._digests.get(path) if path.exists() else None

    def retire(self, path: Path) -> bool:
        """Removes a shard if it was received here, and keeps its slot for the next; false if it is not ours."""
        with self._lock:
            slot = self._published.pop(path, None)
            self._digests.pop(path, None)
            if slot is None:
                return False
            try:
                is_free = slot.withdraw(hidden_path(self._root))
            except CheckpointError:
                slot.close()  # somebody else has removed it
                return True
            if is_free:
                self._free.append(slot)
            else:
                self._drop(slot)
            return True

    def holds(self, path: Path) -> bool:
        """Whether this is a shard that was received here."""
        with self._lock:
            return path in self._published

    def close(self) -> None:
        """Gives all memory back; published files stay, hidden ones go."""
        with self._lock:
            for slot in [*self._free, *(slot for slot, _ in self._incoming.values())]:
                self._drop(slot)
            for slot in self._published.values():
                slot.close()
            self._free.clear()
            self._incoming.clear()
            self._published.clear()

    def _new_slot(self, size_bytes: int) -> Slot:
        for slot in self._free:  # too small for what comes now: their memory is better given back
            self._drop(slot)
        self._free.clear()
        return Slot(size_bytes, hidden_path(self._root), disk=self._disk)

    def _drop(self, slot: Slot) -> None:
        path = slot.path
        slot.close()
        if path is not None:
            self._disk.remove(path)


def sealed_bytes(path: Path, rank: int) -> memoryview | None:
    """The bytes of a published shard, without what its slot has behind them; None if there is none, or not all of it.

    As long as the view lives the file stays locked (the map keeps the open file), so nobody writes into its slot.

    Args:
        path: of the shard.
        rank: whose it is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        lock_file(descriptor, fcntl.LOCK_SH)
        view = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        return view[: record_of(view, rank, path.name).size_bytes]
    except (OSError, ValueError):  # being removed or written, damaged, or empty
        return None
    finally:
        os.close(descriptor)
