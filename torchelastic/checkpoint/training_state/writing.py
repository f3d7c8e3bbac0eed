"""From a copy in memory to a published checkpoint: what each rank does, and what rank 0 does when all are done."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.kinds import Kind
from torchelastic.checkpoint.policy import KeepPolicy
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.pruning import abandon, prune, remove_left_overs
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name
from torchelastic.checkpoint.store.writing import begin, commit, write_shard

log = logging.getLogger(__name__)

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.25


@dataclass
class StateSave:
    """One rank's part of one save.

    Attributes:
        root: the folder of checkpoints.
        name: agreed by all ranks.
        run_id: for the manifest.
        rank: of this process.
        world_size: how many ranks save.
        header: of the shard, without checksums.
        stage: a copy of the tensors.
    """

    root: Path
    name: SaveId
    run_id: str
    rank: int
    world_size: int
    header: Header
    stage: Stage


class Writer:
    """Writes and publishes; on any thread, one save at a time.

    Args:
        pool: where the stages are from.
        disk: what touches files.
        keep: which checkpoints stay.
        timeout_s: for how long rank 0 waits for the shards of the others in the background.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        pool: SlotPool,
        disk: Disk,
        keep: KeepPolicy,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pool, self._disk, self._keep, self._timeout_s = pool, disk, keep, timeout_s
        self._clock, self._sleep = clock, sleep

    def begin(self, save: StateSave) -> None:
        """Makes the hidden folder; no rank writes before all have done it. Raises: CheckpointError."""
        begin(save.root, save.name, self._disk)

    def write(self, save: StateSave) -> ShardRecord:
        """Writes this rank's shard, onto the disk. Raises: CheckpointError."""
        # no threads of an executor: there are none any more while the interpreter ends
        save.stage = self._pool.seal(save.stage, save.header, threads=1)
        folder = save.root / save.name.staging_name  # not made here: if it is gone, the save was given up
        return write_shard(folder, save.rank, save.world_size, save.stage.shard, self._disk)

    def publish(self, save: StateSave, records: list[ShardRecord], fence: Fence) -> None:
        """On rank 0, when all have written: one rename, then what is not kept goes. Raises: CheckpointError."""
        manifest = Manifest(save.name, save.run_id, save.world_size, tuple(records), saved_s=time.time())
        commit(save.root, manifest, fence=fence, disk=self._disk)
        try:
            prune(save.root, self._keep, self._disk, kind=Kind.TRAINING_STATE)
            # of saves of this job that were given up, too
            remove_left_overs(save.root, (*save.name.token, save.name.generation), self._disk)
        except CheckpointError as error:  # what is saved is saved
            log.warning("%s is saved, and what is old could not be removed: %s", save.name, error)

    def abandon(self, save: StateSave) -> None:
        """Removes what was written; whoever waits for it sees that. Raises nothing."""
        try:
            abandon(save.root, save.name, self._disk)
        except CheckpointError:
            pass  # only left-overs, which the next job removes; the first error is the one to see

    def finish(self, save: StateSave, fence: Fence | None) -> None:
        """In the background: all of it; `fence` on rank 0 only. Raises: CheckpointError, and nothing is left."""
        try:
            record = self.write(save)
            if fence is not None:
                self.publish(save, [record, *(self._other(save, rank) for rank in range(1, save.world_size))], fence)
        except CheckpointError as error:
            self.abandon(save)
            if error.errno == errno.ENOENT and save.world_size > 1:
                raise _given_up(save.name) from error  # in the middle of our own write: the system names nobody
            raise
        except BaseException:
            self.abandon(save)
            raise

    def _other(self, save: StateSave, rank: int) -> ShardRecord:
        """The shard of another rank, as soon as it is there."""
        folder, file = save.root / save.name.staging_name, shard_file_name(rank, save.world_size)
        until_s, pause_s = self._clock() + self._timeout_s, _FIRST_LOOK_S
        while True:
            record = _record_if_there(folder / file, rank)
            if record is not None:
                return record
            if not folder.exists():
                raise _given_up(save.name)
            if self._clock() >= until_s:
                raise CheckpointError(
                    f"rank {rank} has not written {file} into {folder} within {self._timeout_s:g} s: it is lost or "
                    "slow, or the ranks do not see the same folder"
                )
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)


def _given_up(name: SaveId) -> CheckpointError:
    return CheckpointError(f"{name} was given up by another rank, which could not write: see its log")


def _record_if_there(path: Path, rank: int) -> ShardRecord | None:
    """What a shard's file says about itself; None if there is no such file yet."""
    try:
        return record_in(path, rank)
    except CheckpointError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def record_as_plain(record: ShardRecord) -> dict[str, Any]:
    """What JSON can hold."""
    return asdict(record)
