"""The shards that lie on this host: one folder per rank, of which each rank fills its own.

    <root>/<session_id>/<rank>/step-000000010.e0.r0.g3.9f3a12cd.shard-00001-of-00004.shard

The last numbers are the shard's rank and how many ranks saved: replicas lie in the folder of who holds them.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.local.names import SUFFIX, described, header_meta
from torchelastic.checkpoint.local.shard_write import ShardWrite
from torchelastic.checkpoint.replication.client import ReplicaClient, pull_into
from torchelastic.checkpoint.replication.errors import ReplicaRefusedError
from torchelastic.checkpoint.shards import ShardReader
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.image import read_header, tensors_of
from torchelastic.checkpoint.shards.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.shards.slot_shelf import SlotShelf, sealed_bytes
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.shards.writing import hidden_path
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, file_name_of, find_shard

log = logging.getLogger(__name__)

#: So many saves of a rank are written at the same time: one that goes on while the next one is copied.
MOST_IN_FLIGHT = 2
#: Who waits for longer is told in the log what for.
TOLD_AFTER_S = 10.0
PAUSE_S = 0.005


@dataclass(frozen=True)
class HeldShard:
    """A shard that lies here.

    Attributes:
        shard: which.
        folder: the number of the rank folder that it lies in.
        saved_s: when its save began, in seconds of wall time.
    """

    shard: ShardId
    folder: int
    saved_s: float = 0.0


class ShardFolder:
    """A rank's folder, its slots, and a look into the folders beside it. A `ReplicaShelf` for the server.

    Args:
        root: the folder of the session on this host.
        rank: whose folder it is.
        session_id: of the manager.
        disk: what touches files.

    Attributes:
        path: the rank's folder.

    Raises:
        CheckpointError: it cannot be created.
    """

    def __init__(self, root: Path, rank: int, session_id: str, disk: Disk) -> None:
        self.root, self.rank, self.path = root, rank, root / str(rank)
        self._session_id, self.disk = session_id, disk
        disk.make_folder(self.path)
        for number in self.folders():
            remove_left_overs(root / str(number), disk)
        self._own, self._replicas = SlotPool(self.path, disk=disk), SlotShelf(self.path, disk)
        self._lock = threading.RLock()  # guards the rest; the server's threads come here too
        self._in_flight: dict[ShardId, tuple[Stage, ShardWrite]] = {}

    # --- what is here -------------------------------------------------------------------------------------------------

    def folders(self) -> list[int]:
        """The rank folders on this host, sorted."""
        try:
            return sorted(int(entry.name) for entry in self.root.iterdir() if entry.name.isdecimal() and entry.is_dir())
        except FileNotFoundError:
            return []  # somebody has removed it

    def path_of(self, shard: ShardId, folder: int) -> Path:
        """Where a shard lies, or would."""
        return self.root / str(folder) / file_name_of(shard)

    def held(self, folders: Iterable[int]) -> list[HeldShard]:
        """The shards in some of the folders whose headers are as they should be; warnings name the others."""
        self._require_folder()
        self.settle()
        found = []
        for folder in folders:
            for shard in self._shards_in(folder):
                try:
                    with ShardReader(self.path_of(shard, folder)) as reader:
                        self._check(reader.header, shard, str(reader.path))
                        found.append(HeldShard(shard, folder, float(reader.header.meta.get("saved_s", 0.0))))
                except CorruptCheckpointError as error:
                    log.warning("%s; it is passed over", error)
                except (CheckpointError, TypeError, ValueError) as error:
                    log.info("passed over: %s", error)  # removed meanwhile, or still being written
        return found

    def open_copy(self, shard: ShardId, folder: int, client: ReplicaClient | None, *, keep: bool) -> ShardReader:
        """Opens one copy of a shard.

        Args:
            shard: which.
            folder: the rank folder of this host in which it lies.
            client: of the rank that has it, if that is on another host.
            keep: what is fetched from another host is kept here, in place of a damaged copy; else it goes with its
                reader.

        Raises:
            CorruptCheckpointError: this copy cannot be had; another one may.
        """
        try:
            if client is None:
                return ShardReader(self.path_of(shard, folder))
            return self._fetched(shard, client) if keep else self._fetched_unnamed(shard, client)
        except CheckpointError as error:
            raise CorruptCheckpointError(str(error)) from error

    def _fetched(self, shard: ShardId, client: ReplicaClient) -> ShardReader:
        """Gets a shard into the own folder; it takes its name only when all of it is good."""
        name = str(shard)

        def check(view: memoryview) -> None:
            tensors_of(torch.frombuffer(view, dtype=torch.uint8), f"the copy of {name} at {client.peer}")

        pull_into(self, name, partial(client.pull, name), check)
        log.info("fetched %s from %s", described(shard), client.peer)
        return ShardReader(self.path_of(shard, self.rank))

    def _fetched_unnamed(self, shard: ShardId, client: ReplicaClient) -> ShardReader:
        path = hidden_path(self.path)

        def destination(size_bytes: int) -> memoryview:
            descriptor = self.disk.create(path)
            try:
                self.disk.allocate(descriptor, size_bytes, path)
                return memoryview(mmap.mmap(descriptor, size_bytes))
            finally:
                os.close(descriptor)  # and with it the lock that would keep the reader out

        try:
            client.pull(str(shard), destination)
            return ShardReader(path)
        finally:
            self.disk.remove(path)

    def has_room_beside(self) -> bool:
        """Whether saving can go on beside what lies here, if all of that stays: each rank comes to two more slots."""
        with explained("look for room for checkpoints", self.root):
            held_bytes = sum(path.stat().st_size for path in self.root.glob(f"*/*{SUFFIX}"))
            return shutil.disk_usage(self.root).free >= 2 * held_bytes

    def saves_in(self, folders: Iterable[int]) -> set[SaveId]:
        """The saves of which anything lies in some of the folders."""
        return {shard.name for folder in folders for shard in self._shards_in(folder)}

    def _shards_in(self, folder: int) -> Iterator[ShardId]:
        try:
            names = sorted(path.name for path in (self.root / str(folder)).iterdir())
        except FileNotFoundError:
            return
        for name in names:
            shard = find_shard(name)
            if shard is not None:
                yield shard

    def _check(self, header: Header, shard: ShardId, where: str) -> None:
        expected = header_meta(shard, self._session_id)
        if {key: header.meta.get(key) for key in expected} != expected:
            raise CorruptCheckpointError(f"{where} is something else than its name says: it was renamed or replaced")

    def _require_folder(self) -> None:
        """Makes the folder again if somebody has removed it, as a disk that was replaced."""
        with self._lock:
            if self.path.is_dir():
                return
            log.warning("the folder %s was removed from outside, with all checkpoints in it", self.path)
            self._own.close()
            self._replicas.close()
            self.disk.make_folder(self.path)
            self._own, self._replicas = SlotPool(self.path, disk=self.disk), SlotShelf(self.path, self.disk)

    # --- own saves ----------------------------------------------------------------------------------------------------

    def take(self, header: Header) -> Stage:
        """A warm place for the tensors of a save. Raises: CheckpointError if there is no room for it."""
        self._require_folder()
        return self._own.take(header)

    def give_back(self, stage: Stage) -> None:
        """The save was called off before it was begun."""
        self._own.give_back(stage)

    def begin(self, shard: ShardId, stage: Stage, write: ShardWrite) -> None:
        """The tensors are copied; now the file is the background's, until `settle` finds that it has its name."""
        with self._lock:
            self._in_flight[shard] = stage, write

    @property
    def busy(self) -> set[SaveId]:
        """The saves that are being written here, or received."""
        coming = {ShardId.parse(name).name for name in self._replicas.incoming()}
        with self._lock:
            return {shard.name for shard in self._in_flight} | coming

    def wait_for_turn(self, bound_s: float) -> None:
        """Waits until at most one save of this rank is being written: memory is not to grow with a slow background.

        One that takes longer than `bound_s`, or whose request nobody has given to a queue, does not stop training: a
        warning says that more memory is taken.
        """
        began_s, told_s = time.monotonic(), TOLD_AFTER_S
        while True:
            self.settle()
            with self._lock:
                begun = [shard.name.step for shard in self._in_flight]
            waited_s = time.monotonic() - began_s
            if len(begun) < MOST_IN_FLIGHT:
                return
            if waited_s >= min(told_s, bound_s):
                log.warning(
                    "the asynchronous saves of the iterations %s are not written yet; the next one waits for %.0f s so "
                    "far (at most %.0f s, then it takes more memory): give each request to a queue, or save less often",
                    begun,
                    waited_s,
                    bound_s,
                )
                told_s *= 2
            if waited_s >= bound_s:
                return
            time.sleep(PAUSE_S)

    def settle(self) -> None:
        """Takes back the slots of saves whose background part has ended, well or badly."""
        with self._lock:
            for shard, (stage, write) in list(self._in_flight.items()):
                if write.hidden.exists():
                    continue
                del self._in_flight[shard]
                if write.target.exists():
                    self._own.adopt(stage, write.target)
                else:
                    self._drop(stage)

    def call_off(self, save: SaveId) -> None:
        """A save has failed somewhere: what is here of it goes."""
        with self._lock:
            for shard in [shard for shard in self._in_flight if shard.name == save]:
                stage, _ = self._in_flight.pop(shard)
                self._drop(stage)
        self.prune({save}, [self.rank])

    def _drop(self, stage: Stage) -> None:
        """Gives memory back that the background may still write to: it is not used again."""
        path = stage.slot.path
        stage.slot.close()
        if path is not None:
            self._remove(path)

    def prune(self, doomed: Collection[SaveId], folders: Iterable[int]) -> None:
        """Removes all shards of some saves from some folders; a failure is logged, and tried again the next time."""
        with self._lock:
            for folder in folders:
                for shard in [shard for shard in self._shards_in(folder) if shard.name in doomed]:
                    self._retire(self.path_of(shard, folder))

    def _retire(self, path: Path) -> None:
        try:
            if not self._replicas.retire(path):
                self._own.retire(path)
        except CheckpointError as error:
            log.warning("a local checkpoint could not be removed: %s", error)

    def _remove(self, path: Path) -> None:
        try:
            self.disk.remove(path)
        except CheckpointError as error:
            log.warning("a left-over of a local checkpoint could not be removed: %s", error)

    # --- shards of others ---------------------------------------------------------------------------------------------

    def destination(self, object_id: str, size_bytes: int) -> memoryview:
        """See `ReplicaShelf`: a warm slot.

        Raises:
            ValueError: that is no shard's name.
            ReplicaRefusedError: there is no room, and waiting for it would be in vain: what lies here stays until the
                next save is complete.
        """
        ShardId.parse(object_id)
        self._require_folder()
        try:
            return self._replicas.take(object_id, size_bytes)
        except CheckpointError as error:
            raise ReplicaRefusedError(str(error)) from error

    def received(self, object_id: str, digest: str) -> None:
        """See `ReplicaShelf`: gives it its name, in place of what has it already.

        Not flushed to the disk first: what a power failure takes is noticed by its checksums, and others hold it too.

        Raises:
            CorruptCheckpointError: it is not the shard that its name says.
        """
        shard, name = ShardId.parse(object_id), f"what was received as {object_id}"
        try:
            self._check(read_header(self._replicas.incoming()[object_id], name)[0], shard, name)
            with self._lock:
                target = self.path_of(shard, self.rank)
                if target.exists():
                    self._retire(target)
                self._replicas.publish(object_id, target, digest)
        except BaseException:
            self._replicas.abandon(object_id)
            raise

    def abandon(self, object_id: str) -> None:
        """See `ReplicaShelf`."""
        self._replicas.abandon(object_id)

    def source(self, object_id: str) -> memoryview | None:
        """See `ReplicaShelf`: from any rank's folder on this host, the own one first."""
        shard = ShardId.parse(object_id)
        for folder in [self.rank, *self.folders()]:
            view = sealed_bytes(self.path_of(shard, folder))
            if view is not None:
                return view
        return None

    def digest(self, object_id: str) -> str | None:
        """See `ReplicaShelf`."""
        return self._replicas.digest_at(self.path_of(ShardId.parse(object_id), self.rank))

    def ids(self) -> list[str]:
        """See `ReplicaShelf`."""
        return sorted(str(shard) for folder in self.folders() for shard in self._shards_in(folder))

    def close(self) -> None:
        """Gives the memory back; what has its name stays, what is being written is called off."""
        with self._lock:
            self.settle()
            for stage, _ in self._in_flight.values():
                self._drop(stage)
            self._in_flight.clear()
            self._own.close()
            self._replicas.close()
