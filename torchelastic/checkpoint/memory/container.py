"""The folder of one job on this host's tmpfs: its checkpoints, and the slots in which the next ones are built.

All ranks of a host share it, each with slots of its own. Nothing in it is believed without its checksums. Who removes
what: each process removes its own shards, since it uses their memory again; what no living process holds, anybody does.

A host that has the commit of a checkpoint removes older ones without waiting for the other hosts. If it is lost then,
those without the commit still have all of the older checkpoint; if another one is lost, it has the commit, and every
shard has its replica.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.memory.commit import (
    Commit,
    CommitHead,
    candidate_from,
    commit_from,
    content_of,
    meta_of,
    shards_of,
)
from torchelastic.checkpoint.memory.dead_jobs import JOB_FILE
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, CheckpointContainerId, is_part, require_shard
from torchelastic.checkpoint.memory.job import known_run_id
from torchelastic.checkpoint.memory.registry import ContainerRegistry
from torchelastic.checkpoint.memory.slots import Slots
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.shards.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.slot_replica_store import SlotReplicaStore
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.shards.tree import unflatten
from torchelastic.checkpoint.shards.writing import save_tree, write_whole
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.pruning import abandon, remove_left_overs
from torchelastic.checkpoint.store.reading import sizes_in
from torchelastic.checkpoint.store.save_id import SaveId, find_shard
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.checkpoint.store.writing import begin, publish_into
from torchelastic.processes.file_locks import lock_of_nobody

log = logging.getLogger(__name__)

_PUBLISH_ATTEMPTS = 10


class Container:
    """One job's folder on this host; may be used by several threads. The same folder may be open in other processes.

    Args:
        root: the folder, best on tmpfs; created if it is missing. Its last part names the job to the other hosts.
        disk: what touches files.
        registry: of the program; None: this process is alone.

    Attributes:
        root: the folder.
        name: its last part.
        pool: the slots of this process: what was taken there goes to `publish`, or is given back there.
        received: the slots for what this process receives from other hosts.
        slots: who holds which of the pool's.
        fence: who may complete checkpoints here.

    Raises:
        ValueError: the last part of the path cannot name an object.
        CheckpointError: the folder cannot be used, or belongs to another job.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | CheckpointContainerId,
        *,
        disk: Disk = REAL_DISK,
        registry: ContainerRegistry | None = None,
    ) -> None:
        self.root = Path(os.fspath(root) if not isinstance(root, CheckpointContainerId) else str(root)).absolute()
        self.name = self.root.name
        if not is_part(self.name):
            raise ValueError(
                f"the container {self.root} cannot be used: its last part names the job to the other hosts; use "
                "letters, digits and _.=@+,- there, at most 128, the first of them no dot"
            )
        self.disk = disk
        self.fence = Fence(self.root, disk, owner_lock=JOB_FILE)
        self._run_id = self.fence.enter(known_run_id() or "")
        self.pool = SlotPool(self.root, disk=disk)
        self.received = SlotReplicaStore(self.root, disk)
        self.slots = Slots(self)
        self._registry = registry if registry is not None else ContainerRegistry()
        self._registry.add(self.root)
        self._lock = threading.RLock()  # one looks at the commits, or changes them, at a time
        remove_hidden_files(self.root, disk)

    def folder_of(self, step: int) -> Path:
        """The container of one step; it need not be there."""
        return self.root / CheckpointContainerId.format_version_container(step)

    def open(self, step: int, file: str) -> ShardReader:
        """Opens a shard, and compares what its header states with its name.

        Raises:
            CorruptCheckpointError: it is no shard, or another one.
            CheckpointError: it cannot be read.
        """
        shard = ShardReader(self.folder_of(step) / file)
        name = find_shard(file)
        try:
            if name is not None:
                require_shard(name, shard.header.meta, str(shard.path))
        except BaseException:
            shard.close()
            raise
        return shard

    # --- who may write ------------------------------------------------------------------------------------------------

    def epochs(self, group: str) -> tuple[int, int]:
        """The epoch in which this program saves as a member of a group (0: none yet), and the highest known here.

        Raises:
            FencedError: the group was replaced.
        """
        last_group, epoch = self._registry.joined(self.name)
        joined = epoch if last_group == group else 0
        if joined:
            self.fence.check(joined, 0)
        return joined, max([self.fence.known_epoch(self._run_id), *(one.name.epoch for one in self.entries())])

    def join(self, group: str, epoch: int) -> None:
        """From now on nothing is completed here that was saved in an earlier epoch. Raises: FencedError."""
        if (group, epoch) != self._registry.joined(self.name):
            self.fence.join(epoch, self._run_id)
            remove_left_overs(self.root, (epoch, 0), self.disk)
            self._registry.join(self.root, group, epoch)

    # --- writing ------------------------------------------------------------------------------------------------------

    def publish(self, stage: Stage, header: Header | None, step: int, file: str) -> Path:
        """Seals a stage and gives it its name; on any thread. Where it fails, the stage is given back.

        Args:
            stage: with all tensors copied.
            header: of the stage, with checksums and meta; None: it is sealed already.
            step: of the checkpoint.
            file: the name of the shard's file, or of another object.

        Raises:
            CheckpointError: the name is taken, or the disk refuses.
        """
        path = self.folder_of(step) / file
        try:
            stage = self.pool.seal(stage, header) if header is not None else stage
            self._publish(stage, path)
        except BaseException:
            self.pool.give_back(stage)
            raise
        return path

    def _publish(self, stage: Stage, path: Path) -> None:
        for attempt in range(_PUBLISH_ATTEMPTS):
            self.disk.make_folder(path.parent)
            try:
                self.pool.publish(stage, path)
                return
            except CheckpointError as error:
                # another rank, tidying up, has removed the folder of this step in the moment when it was empty
                if error.errno != errno.ENOENT or attempt == _PUBLISH_ATTEMPTS - 1:
                    raise

    def write_commit(self, commit: Commit, *, by_all: bool = False) -> Path:
        """Makes a step complete on this host, with its extra files; replaces an older commit of the same step.

        Args:
            commit: of shards that all have their replicas.
            by_all: all ranks have agreed on it, after those that saved it: the fence is not asked.

        Returns:
            Where the commit lies.

        Raises:
            FencedError: who saved it was replaced.
            CheckpointError: the disk refuses; nothing has changed.
        """
        folder, fence = self.folder_of(commit.step), None if by_all else self.fence
        if fence is not None:
            fence.check(*commit.name.token)
        with self._lock:
            here = self._commit_in(folder)
            if here is not None and here.name > commit.name:  # this thread was stopped, and the step was saved anew
                return folder / COMMIT_FILE
            self.disk.make_folder(folder)
            abandon(self.root, commit.name, self.disk)  # a process that was killed may have begun to write it
            staging = begin(self.root, commit.name, self.disk)
            try:
                for name, content in commit.extras.items():
                    write_whole(staging / name, [memoryview(content)], self.disk)
                save_tree(staging / COMMIT_FILE, content_of(commit), meta=meta_of(commit), disk=self.disk)
                publish_into(folder, commit.name, [*commit.extras, COMMIT_FILE], fence=fence, disk=self.disk)
            finally:
                abandon(self.root, commit.name, self.disk)
        return folder / COMMIT_FILE

    # --- reading ------------------------------------------------------------------------------------------------------

    def entries(self) -> list[TierEntry]:
        """What is here of each save, newest first. A damaged commit is removed.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        with self._lock:
            found = [entry for step in self._steps() for entry in self._look_into(step)]
        return sorted(found, key=lambda entry: entry.name, reverse=True)

    def _steps(self) -> list[int]:
        """The steps that have a container, the highest first."""
        with explained("list the checkpoints in memory", self.root), os.scandir(self.root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        numbers = map(CheckpointContainerId.parse_version_container_step, names)
        return sorted((number for number in numbers if number is not None), reverse=True)

    def _look_into(self, step: int) -> list[TierEntry]:
        folder, ranks = self.folder_of(step), defaultdict[tuple[SaveId, int], list[int]](list)
        for shard in filter(None, map(find_shard, sizes_in(folder))):
            if shard.name.step == step:
                ranks[shard.name, shard.world_size].append(shard.rank)
        commit = self._commit_in(folder)
        committed = set() if commit is None else {(commit.name, commit.world_size)}
        return [TierEntry(*save, tuple(sorted(ranks[save])), save in committed) for save in ranks.keys() | committed]

    def _commit_in(self, folder: Path) -> CommitHead | None:
        """The commit of a step, by its header; None: there is none, or it cannot be read."""
        path = folder / COMMIT_FILE
        try:
            return read_candidate(folder) if path.exists() else None
        except CorruptCheckpointError as error:
            log.warning("%s is of no use and is removed: %s", path, error)
            self.disk.remove(path)
        except CheckpointError as error:
            if path.exists():  # else another process has removed it while we looked
                log.warning("%s cannot be read: %s", path, error)
        return None

    def has_committed(self, path: Path) -> bool:
        """Whether a shard is part of the checkpoint of its step, as far as this host knows."""
        try:
            return path.name in read_candidate(path.parent).files
        except CheckpointError:
            return False

    # --- removing -----------------------------------------------------------------------------------------------------

    def newest(self) -> SaveId | None:
        """The newest checkpoint that is complete here."""
        return next((one.name for one in self.entries() if one.is_committed), None)

    def tidy(self) -> list[int]:
        """Removes what the newest commit has replaced, as far as it is this process's to remove.

        That is every older commit, and every shard of an older save, or of one that counted alike and failed, whatever
        the steps: a run may have gone back. Call it on any thread.

        Returns:
            The steps that are gone.
        """
        with self._lock:
            entries = self.entries()
            newest = next((one.name for one in entries if one.is_committed), None)
            if newest is None:
                return []
            for one in entries:
                if one.name != newest and (one.name.epoch, one.name.generation) <= (newest.epoch, newest.generation):
                    self._remove_save(one)
            return [step for step in self._steps() if step != newest.step and self._remove_if_empty(step)]

    def remove(self, step: int) -> None:
        """Removes a step as far as it is this process's to remove; it is no checkpoint any more. It may be gone.

        Raises:
            CheckpointError: the disk refuses.
        """
        with self._lock:
            self.remove_commit(step)
            for one in self._look_into(step):
                self._remove_save(one)
            self._remove_if_empty(step)

    def _remove_save(self, entry: TierEntry) -> None:
        if entry.is_committed:
            self.remove_commit(entry.name.step)  # first: without its shards it would promise too much
        for file in shards_of(entry):
            self.remove_object(self.folder_of(entry.name.step) / file)

    def remove_commit(self, step: int) -> None:
        """The step is no checkpoint any more. Raises: CheckpointError if the disk refuses."""
        self.disk.remove(self.folder_of(step) / COMMIT_FILE)

    def remove_object(self, path: Path) -> None:
        """Removes one file of a step, unless another process uses it. Raises: CheckpointError if the disk refuses."""
        if self.pool.holds(path):
            self.pool.retire(path)
        elif not self.received.retire(path):
            with lock_of_nobody(path) as is_left_over:
                if is_left_over:
                    self.disk.remove(path)

    def _remove_if_empty(self, step: int) -> bool:
        """Removes a step's folder if only extra files are left in it."""
        folder = self.folder_of(step)
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries]
            if any(name.endswith(".shard") for name in names):
                return False
            for name in names:
                self.remove_object(folder / name)
            with explained("remove a checkpoint", folder):
                folder.rmdir()
        except FileNotFoundError:
            return True
        except CheckpointError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # somebody has begun to write there: good
                raise
            return error.errno == errno.ENOENT
        return True

    def remove_all(self) -> None:
        """Removes the whole folder with everything in it: the job is over. Slots of this process are given back."""
        self.close()
        self.disk.remove_folder(self.root)

    def close(self) -> None:
        """Gives the memory of free slots back; what is published stays."""
        self.received.close()
        self.pool.close()
        self.fence.release()


def read_candidate(folder: Path) -> CommitHead:
    """What the header of a commit says.

    Args:
        folder: of the step; its container need not be claimed.

    Raises:
        CorruptCheckpointError: there is none, or it is damaged.
        CheckpointError: it cannot be read.
    """
    return _read(folder, lambda shard: candidate_from(shard.header.meta))


def read_commit(folder: Path) -> Commit:
    """The same with DCP's metadata and the extra files."""
    return _read(folder, lambda shard: commit_from(shard.header.meta, unflatten(shard.header.structure, shard.read())))


_Head = TypeVar("_Head", bound=CommitHead)


def _read(folder: Path, decode: Callable[[ShardReader], _Head]) -> _Head:
    path = folder / COMMIT_FILE
    if not path.exists():
        raise CorruptCheckpointError(f"{folder} has no commit: it is being written, or was never complete")
    with ShardReader(path) as shard:
        try:
            commit = decode(shard)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {error}") from error
    if CheckpointContainerId.parse_version_container_step(folder.name) != commit.step:
        raise CorruptCheckpointError(f"{path} is the commit of step {commit.step}")
    return commit
