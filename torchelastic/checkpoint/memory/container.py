"""The folder of one job on this host's tmpfs: its checkpoints, and the slots in which the next ones are built.

All ranks of a host share it, each with slots of its own. Nothing in it is believed without its checksums. Who removes
what: each process removes its own shards, since it uses their memory again; what no living process holds, anybody does.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.memory.commit import (
    Commit,
    CommitHead,
    StoredStep,
    candidate_from,
    commit_from,
    content_of,
    meta_of,
)
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, PENDING_FILE, CheckpointContainerId, ShardName, is_part
from torchelastic.checkpoint.memory.job import claim
from torchelastic.checkpoint.memory.slots import Slots
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk, lock_of_nobody
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.slot_shelf import SlotShelf
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.shards.tree import unflatten
from torchelastic.checkpoint.shards.writing import hidden_path, save_tree

log = logging.getLogger(__name__)

_PUBLISH_ATTEMPTS = 10


class Container:
    """One job's folder on this host; may be used by several threads. The same folder may be open in other processes.

    Args:
        root: the folder, best on tmpfs; created if it is missing. Its last part names the job to the other hosts.
        disk: what touches files.

    Attributes:
        root: the folder.
        name: its last part.
        pool: the slots of this process: what was taken there goes to `publish`, or is given back there.
        received: the slots for what this process receives from other hosts.
        slots: who holds which of the pool's.

    Raises:
        ValueError: the last part of the path cannot name an object.
        CheckpointError: the folder cannot be used, or belongs to another job.
    """

    def __init__(self, root: str | os.PathLike[str] | CheckpointContainerId, *, disk: Disk = REAL_DISK) -> None:
        self.root = Path(os.fspath(root) if not isinstance(root, CheckpointContainerId) else str(root)).absolute()
        self.name = self.root.name
        if not is_part(self.name):
            raise ValueError(
                f"the container {self.root} cannot be used: its last part names the job to the other hosts; use "
                "letters, digits and _.=@+,- there, at most 128, the first of them no dot"
            )
        self.disk = disk
        self._claim = claim(self.root, disk=disk)
        self.pool = SlotPool(self.root, disk=disk)
        self.received = SlotShelf(self.root, disk)
        self.slots = Slots(self)
        self._lock = threading.RLock()  # one looks at the commits, or changes them, at a time
        remove_left_overs(self.root, disk)

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
        name = ShardName.find(file)
        try:
            if name is not None:
                name.require_in(shard.header.meta, step, str(shard.path))
        except BaseException:
            shard.close()
            raise
        return shard

    # --- writing ------------------------------------------------------------------------------------------------------

    def publish(self, stage: Stage, header: Header | None, step: int, name: ShardName | str) -> Path:
        """Seals a stage and gives it its name; on any thread. Where it fails, the stage is given back.

        Args:
            stage: with all tensors copied.
            header: of the stage, with checksums and meta; None: it is sealed already.
            step: of the checkpoint.
            name: of the shard, or of another object.

        Raises:
            CheckpointError: the name is taken, or the disk refuses.
        """
        path = self.folder_of(step) / str(name)
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

    def write_commit(self, commit: Commit, *, is_settled: bool) -> Path:
        """Makes a step complete on this host, with its extra files; replaces an older commit of the same step.

        Args:
            commit: of shards that all have their replicas.
            is_settled: false until another host has it too; until then older steps stay.

        Raises:
            CheckpointError: the disk refuses; nothing has changed.
        """
        folder = self.folder_of(commit.step)
        new = folder / f"commit.{secrets.token_hex(4)}.new"  # not hidden: nobody holds it between here and its rename
        with self._lock:
            self.disk.make_folder(folder)
            save_tree(new, content_of(commit), meta=meta_of(commit), disk=self.disk)
            try:
                with ShardReader(new):  # locked, so that no other process that tidies up takes it for a left-over
                    self._write_extras(folder, commit.extras)
                    self.disk.rename(new, folder / PENDING_FILE)
            except BaseException:
                self.disk.remove(new)
                raise
            return self.settle(commit.step) if is_settled else folder / PENDING_FILE

    def settle(self, step: int) -> Path:
        """Another host has the commit of this step too. Raises: CheckpointError."""
        folder = self.folder_of(step)
        with self._lock:
            if commit_path(folder) == folder / COMMIT_FILE:  # the step was saved anew while this process was stopped
                self.disk.remove(folder / PENDING_FILE)
            else:
                self.disk.rename(folder / PENDING_FILE, folder / COMMIT_FILE)
        return folder / COMMIT_FILE

    def _write_extras(self, folder: Path, extras: Mapping[str, bytes]) -> None:
        for name, content in extras.items():
            hidden = hidden_path(self.root)
            descriptor = self.disk.create(hidden)
            try:
                self.disk.write(descriptor, [memoryview(content)], hidden)
                self.disk.rename(hidden, folder / name)
            except BaseException:
                self.disk.remove(hidden)
                raise
            finally:
                os.close(descriptor)

    # --- reading ------------------------------------------------------------------------------------------------------

    def steps(self) -> list[StoredStep]:
        """What is here, newest first: by generation where there is a commit, then by step.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        found = []
        with self._lock, explained("list the checkpoints in memory", self.root):
            for entry in os.scandir(self.root):
                number = CheckpointContainerId.parse_version_container_step(entry.name)
                if number is not None and entry.is_dir(follow_symlinks=False):
                    found.append(self._look_into(number, Path(entry.path)))
        return sorted(found, key=lambda one: (one.commit.generation if one.commit else -1, one.step), reverse=True)

    def _look_into(self, step: int, folder: Path) -> StoredStep:
        sizes: dict[ShardName, int] = {}
        try:
            for entry in os.scandir(folder):
                name = ShardName.find(entry.name)
                if name is not None:
                    sizes[name] = entry.stat().st_size
            path = commit_path(folder)
            commit = read_candidate(folder)
        except FileNotFoundError:
            return StoredStep(step, {})  # removed while we look
        except CheckpointError as error:
            is_there = commit_path(folder) is not None  # else another process has removed it while we looked
            if is_there and not isinstance(error, CorruptCheckpointError):
                log.warning("the commit of step %d cannot be read: %s", step, error)
            return StoredStep(step, sizes)
        return StoredStep(step, sizes, commit, is_settled=path is not None and path.name == COMMIT_FILE)

    def has_committed(self, path: Path) -> bool:
        """Whether a shard is part of the checkpoint of its step, as far as this host knows."""
        try:
            return path.name in read_candidate(path.parent).files
        except CheckpointError:
            return False

    # --- removing -----------------------------------------------------------------------------------------------------

    def newest_generation(self) -> int:
        """The highest generation of the commits here; -1 if there is none."""
        return max((step.commit.generation for step in self.steps() if step.commit), default=-1)

    def generation_in_use(self) -> int:
        """The highest generation of anything on this host, complete or not; -1 if there is nothing."""
        steps = self.steps()
        of_commits = [step.commit.generation for step in steps if step.commit is not None]
        return max([*of_commits, *(name.generation for step in steps for name in step.shards)], default=-1)

    def tidy(self) -> list[int]:
        """Removes what the newest settled commit has replaced, as far as it is this process's to remove.

        That is every commit of a lower generation, and every shard of its generation or a lower one that is none of its
        own, whatever the steps: a run may have gone back. Call it on any thread.

        Returns:
            The steps that are gone.
        """
        gone: list[int] = []
        with self._lock:
            steps = self.steps()
            settled = next((one.commit for one in steps if one.commit is not None and one.is_settled), None)
            if settled is None:
                return gone
            for one in steps:
                if one.commit is not None and one.commit.generation < settled.generation:
                    self._remove_commit(one.step)
                for name in one.shards:
                    is_kept = one.step == settled.step and str(name) in settled.files
                    if name.generation <= settled.generation and not is_kept:
                        self.remove_object(self.folder_of(one.step) / str(name))
                if one.step != settled.step and self._remove_if_empty(one.step):
                    gone.append(one.step)
        return gone

    def remove(self, step: int) -> None:
        """Removes a step as far as it is this process's to remove; it is no checkpoint any more. It may be gone.

        Raises:
            CheckpointError: the disk refuses.
        """
        with self._lock:
            self._remove_commit(step)
            for name in self._look_into(step, self.folder_of(step)).shards:
                self.remove_object(self.folder_of(step) / str(name))
            self._remove_if_empty(step)

    def _remove_commit(self, step: int) -> None:
        for name in (COMMIT_FILE, PENDING_FILE):
            self.disk.remove(self.folder_of(step) / name)

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
        self._claim.close()


def commit_path(folder: Path) -> Path | None:
    """Where the commit lies in the folder of a step; None if there is none.

    Of two it is the one of the higher generation: the pending one, unless a process that was stopped for long has
    written that when the step had been saved anew.
    """
    there = [folder / name for name in (PENDING_FILE, COMMIT_FILE) if (folder / name).exists()]
    return max(there, key=_generation_in) if len(there) > 1 else next(iter(there), None)


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
    return _read(folder, commit_in)


def commit_in(shard: ShardReader) -> Commit:
    """The commit that a shard holds. Raises: CorruptCheckpointError."""
    return commit_from(shard.header.meta, unflatten(shard.header.structure, shard.read()))


_Head = TypeVar("_Head", bound=CommitHead)


def _read(folder: Path, decode: Callable[[ShardReader], _Head]) -> _Head:
    path = commit_path(folder)
    if path is None:
        raise CorruptCheckpointError(f"{folder} has no commit: it is being written, or was never complete")
    with ShardReader(path) as shard:
        try:
            commit = decode(shard)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {error}") from error
    if CheckpointContainerId.parse_version_container_step(folder.name) != commit.step:
        raise CorruptCheckpointError(f"{path} is the commit of step {commit.step}")
    return commit


def _generation_in(path: Path) -> int:
    """The generation of a commit; -1 if it cannot be read."""
    try:
        with ShardReader(path) as shard:
            return candidate_from(shard.header.meta).generation
    except CheckpointError:
        return -1
