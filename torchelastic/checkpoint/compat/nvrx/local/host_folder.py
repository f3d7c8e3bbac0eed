"""The checkpoints of a session on this host, and the saves that this rank is writing there.

It is a tier in memory like any other, which the ranks of a host share:

    <root>/<session_id>/step-000000010.e1.r1.g3.9f3a12cd/shard-00001-of-00004.shard    the own one, or a copy
                                                         manifest.json

But a shard may be written by another process too, into a slot of this one and by its path alone (`ShardWrite`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

from torchelastic.checkpoint.compat.nvrx.local.shard_write import ShardWrite
from torchelastic.checkpoint.engine.stages import Staged, Stages
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.mapped_files import release_removed
from torchelastic.checkpoint.format.pool import remove_left_overs
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.policy import KeepPolicy
from torchelastic.checkpoint.store.inventory import CheckpointInfo
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.memory_tier import MemoryTier
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import Tier

log = logging.getLogger(__name__)

#: So many saves of a rank are written at the same time: one that goes on while the next one is copied.
MOST_IN_FLIGHT = 2
#: Who waits for longer is told in the log what for.
TOLD_AFTER_S = 10.0
PAUSE_S = 0.005


class HostFolder(MemoryTier):
    """What lies on this host, and what this rank is writing; but for `shelf` used on the thread that trains.

    Args:
        root: the folder of the session on this host.
        keep: which checkpoints stay.
        disk: what touches files.
        durable: where checkpoints go besides, so that a folder without room does not cost them.

    Attributes:
        stages: where shards are built.

    Raises:
        CheckpointError: it cannot be created.
    """

    def __init__(self, root: Path, keep: KeepPolicy, disk: Disk, durable: Tier | None = None) -> None:
        super().__init__(root, keep, name="local", disk=disk)
        self.stages = Stages([self, durable] if durable is not None else [self])
        self.kind = Kind.LOCAL
        disk.make_folder(root)
        remove_left_overs(root, disk)  # room, also for who only loads
        self._left_alone: Collection[SaveId] = ()
        self._in_flight: dict[ShardId, tuple[Stage, ShardWrite]] = {}
        self._lock = threading.Lock()  # a manager that is dropped is closed on whatever thread that happens

    # --- what is here -------------------------------------------------------------------------------------------------

    def held(self) -> list[ShardId]:
        """The shards on this host, by their names and sizes; see `noted_inventory`."""
        self.settle()
        return [ShardId(entry.name, rank, entry.world_size) for entry in self.noted_inventory() for rank in entry.ranks]

    def unreadable(self) -> dict[SaveId, str]:
        """The saves of which something lies here and nothing can be read, and why."""
        return {entry.name: entry.damage for entry in self.inventory() if entry.damage is not None and not entry.ranks}

    def record_of(self, shard: ShardId) -> ShardRecord:
        """What the manifest says of an own shard that was just written.

        Raises:
            FencedError: another job has taken the session over since; it may have removed the shard.
            CheckpointError: the shard cannot be read.
        """
        self._fence.check(*shard.name.token)
        return record_in(self.path_of(shard), shard.rank)

    # --- own saves ----------------------------------------------------------------------------------------------------

    def stage(self, header: Header) -> Stage:
        """See `MemoryTier`."""
        return self.take(header).stage

    def take(self, header: Header) -> Staged:
        """The same; memory beside the folder where that has no room and there is durable storage, too."""
        self._hold_again()
        return self.stages.take(header)

    def begin(self, shard: ShardId, stage: Stage, write: ShardWrite) -> None:
        """The tensors are copied; now the file is the background's, until `settle` finds that it has its name."""
        self._known.add(shard.name)
        with self._lock:
            self._in_flight[shard] = stage, write

    def wait_for_turn(self, bound_s: float) -> None:
        """Waits until at most one save of this rank is being written: memory is not to grow with a slow background.

        One that takes longer than `bound_s`, or whose request nobody has given to a queue, does not stop training: a
        warning says that more memory is taken.
        """
        began_s, told_s = time.monotonic(), TOLD_AFTER_S
        while True:
            self.settle()
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
                    self.pool.adopt(stage, write.target)
                else:
                    self._release(stage)

    def tidy(self, damaged: Collection[SaveId], pending: Collection[SaveId]) -> None:
        """Removes what is not to be kept; a failure is logged, and tried again the next time.

        What was loaded from it may still be in use, and takes no room beside those that are kept.

        Args:
            damaged: saves that cannot be read any more, and go.
            pending: saves that are still being written, and stay.
        """
        self.settle()
        self._left_alone = pending
        try:
            self._delete(damaged)
            self.prune()
        except CheckpointError as error:
            log.warning("a local checkpoint could not be removed: %s", error)
        finally:
            self._left_alone = ()
            release_removed()

    def _own_checkpoints(self) -> list[CheckpointInfo]:
        return [info for info in super()._own_checkpoints() if info.name not in self._left_alone]

    def abort(self, save: SaveId) -> None:
        """A save has failed somewhere: what is here of it goes."""
        with self._lock:
            for shard in [shard for shard in self._in_flight if shard.name == save]:
                stage, _ = self._in_flight.pop(shard)
                self._release(stage)
        try:
            self._delete([save])
        except CheckpointError as error:
            log.warning("what failed of a local checkpoint could not be removed: %s", error)

    def _release(self, stage: Stage) -> None:
        """Gives memory back that the background may still write to: it is not used again."""
        path = stage.slot.path
        stage.slot.close()
        try:
            if path is not None:
                self._disk.remove(path)
        except CheckpointError as error:
            log.warning("a left-over of a local checkpoint could not be removed: %s", error)

    def close(self) -> None:
        """Gives the memory back; what has its name stays, what is being written is called off."""
        self.settle()
        with self._lock:
            for stage, _ in self._in_flight.values():
                self._release(stage)
            self._in_flight.clear()
        self.stages.close()
        super().close()
