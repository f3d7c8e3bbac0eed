"""Shards of other ranks in this host's memory: received into a warm slot, published like the rank's own."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.collection import CheckpointName, record_of, shard_file_name
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.slot import Slot
from torchelastic.checkpoint.shards.writing import hidden_path
from torchelastic.checkpoint.tiers.host_folder import parse_shard_file_name


@dataclass(frozen=True, order=True)
class ShardId:
    """One shard of one checkpoint.

    >>> str(ShardId(CheckpointName(1, 5, 7, 123), 3, 8))
    'step-000000123.e1.r5.g7/shard-00003-of-00008.shard'
    """

    name: CheckpointName
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.name.folder_name}/{shard_file_name(self.rank, self.world_size)}"

    @classmethod
    def parse(cls, text: str) -> ShardId:
        """The inverse of `str`. Raises: ValueError if it is none."""
        folder, _, file = text.partition("/")
        parsed = parse_shard_file_name(file)
        if parsed is None:
            raise ValueError(f"{text!r} is no shard, such as 'step-000000123.e1.r5.g7/shard-00003-of-00008.shard'")
        return cls(CheckpointName.parse(folder), *parsed)


class ReceivedShards:
    """A `ReplicaShelf` on a folder of checkpoints in memory; may be used by several threads.

    The id of an object is the text of its `ShardId`; an object is the whole shard.

    Args:
        root: the folder.
        disk: what touches files.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._incoming: dict[str, tuple[Slot, int]] = {}
        self._published: dict[Path, Slot] = {}
        self._digests: dict[str, str] = {}

    def destination(self, object_id: str, size_bytes: int) -> memoryview | None:
        """Where a shard is to be received; None if there is no room. Raises: ValueError if the id is no shard's."""
        try:
            return self.take_room(object_id, size_bytes)
        except CheckpointError:
            return None

    def take_room(self, object_id: str, size_bytes: int) -> memoryview:
        """As `destination`; raises CheckpointError if there is no room, which says why."""
        ShardId.parse(object_id)
        self.abandon(object_id)
        with self._lock:
            roomy = [slot for slot in self._free if slot.capacity_bytes >= size_bytes]
            slot = min(roomy, key=lambda slot: slot.capacity_bytes) if roomy else self._new_slot(size_bytes)
            if roomy:
                self._free.remove(slot)
            self._incoming[object_id] = (slot, size_bytes)
            return slot.view()[:size_bytes]

    def received(self, object_id: str, digest: str | None) -> None:
        """The shard is complete: gives it its name. What has that name already stays, being the same shard.

        Args:
            object_id: as given to `destination`.
            digest: what `digest` is to return; None if the sender gave none.

        Raises:
            CorruptCheckpointError: what was received is no whole shard.
            CheckpointError: it cannot be published.
        """
        shard, path = ShardId.parse(object_id), self._path_of(object_id)
        with self._lock:
            slot, size_bytes = self._incoming[object_id]
            if record_of(slot.view()[:size_bytes], shard.rank, path.name).size_bytes != size_bytes:
                raise CorruptCheckpointError(f"what was received as {object_id} has {size_bytes} bytes, and should not")
            if path.exists():
                self._free.append(slot)
            else:
                self._disk.make_folder(path.parent)
                slot.publish(path)
                self._published[path] = slot
            del self._incoming[object_id]
            if digest is not None:
                self._digests[object_id] = digest

    def abandon(self, object_id: str) -> None:
        """The shard will not be completed."""
        with self._lock:
            slot, _ = self._incoming.pop(object_id, (None, 0))
            if slot is not None:
                self._free.append(slot)

    def source(self, object_id: str) -> memoryview | None:
        """The bytes of a shard that is here, whoever put it; None if it is not."""
        shard, path = ShardId.parse(object_id), self._path_of(object_id)
        try:
            with path.open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            return view[: record_of(view, shard.rank, path.name).size_bytes]
        except (OSError, ValueError):  # gone, being removed, or empty
            return None

    def digest(self, object_id: str) -> str | None:
        """What was given to `received`; None if the shard is not here, or is this host's own."""
        with self._lock:
            return self._digests.get(object_id) if self._path_of(object_id).exists() else None

    def ids(self) -> list[str]:
        """All shards that are here, whoever put them."""
        found = []
        for path in self._root.glob("step-*/shard-*.shard"):
            name, parsed = CheckpointName.find(path.parent.name), parse_shard_file_name(path.name)
            if name is not None and parsed is not None:
                found.append(str(ShardId(name, *parsed)))
        return sorted(found)

    def retire(self, path: Path) -> bool:
        """Removes a shard if it was received here, and keeps its slot for the next; false if it is not ours."""
        with self._lock:
            slot = self._published.pop(path, None)
            self._digests.pop(f"{path.parent.name}/{path.name}", None)
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

    def _path_of(self, object_id: str) -> Path:
        shard = ShardId.parse(object_id)
        return self._root / shard.name.folder_name / shard_file_name(shard.rank, shard.world_size)

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
