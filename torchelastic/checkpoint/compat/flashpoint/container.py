"""The folder of one job on this host's tmpfs: a tier in memory like any other, whose steps have names for users.

    <root>/step-000000020.e1.r0.g12.5f0c1a2b/shard-00003-of-00009.shard    the shard of a rank, or a copy
                                             shard-00008-of-00009.shard    the commit; see there
                                             manifest.json
           step-20_ckpt/common.pt                                          an attached file, written from the commit
           .tmp-...                                                        slots in which the next shards are built

All ranks of a host share it, each with slots of its own. A slot that was taken for a save belongs to something: a copy
of a state, the items of a plan, or the save itself. When that is gone the save is over, and the slot is free again, or
published, or published without ever having been part of a checkpoint. That is looked at when the next slot is needed:
what a finaliser calls must not take locks.

`step-20_ckpt` is a folder that frameworks create and write
into themselves; it is the newest complete save of its step. Nothing is believed without its checksums. Who
removes what: each process removes its own shards, since it uses their memory again; what no living process holds,
anybody does.

A host that has the manifest of a checkpoint removes older ones without waiting for the other hosts. If it is lost then,
those without it still have all of the older checkpoint; if another one is lost, it has the manifest, and every shard
has its replica.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.compat.flashpoint.commit import Commit, commit_from, content_of, meta_of
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId, is_part
from torchelastic.checkpoint.compat.flashpoint.items import CachedLayout
from torchelastic.checkpoint.compat.flashpoint.job import known_run_id
from torchelastic.checkpoint.compat.flashpoint.plans import NotSavedError
from torchelastic.checkpoint.compat.flashpoint.received_objects import ContainerShelf
from torchelastic.checkpoint.compat.flashpoint.registry import ContainerRegistry
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.shard_writing import save_tree, write_whole
from torchelastic.checkpoint.format.stage import Stage, capacity_for
from torchelastic.checkpoint.format.tree import unflatten
from torchelastic.checkpoint.store.host_memory.dead_jobs import JOB_FILE
from torchelastic.checkpoint.store.host_memory.room import NotSaved, measure, why_no_room
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest
from torchelastic.checkpoint.store.memory_tier import MemoryTier
from torchelastic.checkpoint.store.reading import names_in, open_shard, read_manifest, record_in, sizes_in
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.checkpoint.store.writing import remove_folder, remove_left_overs, require_stored, write_manifest
from torchelastic.processes.dropped import when_dropped
from torchelastic.processes.file_locks import lock_of_nobody

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldSlot:
    """A slot that was taken for a save.

    Attributes:
        container: whose slot it is.
        stage: None once there is nothing left to do about it.
        published: its shard, as far as this process knows.
        is_used: whether a shard is made of the copy of a state in it, so that it is nobody's copy any more.
        is_over: whether it was released.
    """

    container: Container
    stage: Stage | None
    published: Path | None = None
    is_used: bool = False
    is_over: bool = False

    def publish(self, path: Path) -> None:
        """Gives the stage, which is sealed, its name. Raises: CheckpointError; then it is given back."""
        stage, self.stage = self.stage, None
        if stage is None:
            raise CheckpointError(f"{path} was released")
        self.published = self.container.publish(stage, None, path)
        self.stage = stage

    def release(self) -> None:
        """What is in it is of no worth."""
        stage, self.stage, self.is_over = self.stage, None, True
        if stage is None:
            return
        if self.published is not None:
            self.container.remove_object(self.published)
        elif stage.slot.path is not None and stage.slot.path.exists():
            self.container.pool.release(stage)
        else:
            stage.slot.close()  # another process has removed it


class Container(MemoryTier):
    """One job's folder on this host; may be used by several threads. The same folder may be open in other processes.

    Args:
        root: the folder, best on tmpfs; created if it is missing. Its last part names the job to the other hosts.
        disk: what touches files.
        registry: of the program; None: this process is alone.

    Attributes:
        root: the folder.
        name: its last part.
        pool: the slots of this process: what was taken there goes to `publish`, or is given back there.
        shelf: receives shards and commits from other hosts.
        fence: who may complete checkpoints here.
        run_id: of the job that has the folder.
        item_layout: of what is written of plans.
        copy_layout: of copies of states.
        finishing: held by the one save that makes its checkpoint complete and removes others.
        under_way: the slots that this process writes from, by save, as long as anybody has them.
        generation: the highest that this process has given to a save; see `next_generation`.

    Raises:
        ValueError: the last part of the path cannot name an object.
        CheckpointError: the folder cannot be used, or belongs to another job.
    """

    kind = Kind.MEMORY
    shelf: ContainerShelf
    _owner_lock = JOB_FILE

    def __init__(
        self,
        root: str | os.PathLike[str] | CheckpointContainerId,
        *,
        disk: Disk = REAL_DISK,
        registry: ContainerRegistry | None = None,
    ) -> None:
        folder = Path(os.fspath(root)).absolute()
        if not is_part(folder.name):
            raise ValueError(
                f"the container {folder} cannot be used: its last part names the job to the other hosts; use "
                "letters, digits and _.=@+,- there, at most 128, the first of them no dot"
            )
        super().__init__(folder, name=folder.name, disk=disk)
        self.disk, self.fence = disk, self._fence
        self.run_id = self.fence.enter(known_run_id() or "")
        self.shelf = ContainerShelf(self)
        self.item_layout, self.copy_layout = CachedLayout(), CachedLayout()
        self.generation = -1
        self._over: deque[HeldSlot] = deque()
        self._registry = registry if registry is not None else ContainerRegistry()
        self._registry.add(self.root)
        self.finishing = threading.Lock()
        self.under_way: weakref.WeakValueDictionary[SaveId, HeldSlot] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # one completes checkpoints, or removes them, at a time
        remove_hidden_files(self.root, disk)

    def folder_of(self, step: int) -> Path:
        """The container of one step; it need not be there."""
        return self.root / CheckpointContainerId.format_version_container(step)

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
        return joined, self.known_epoch(self.run_id)

    @property
    def has_saved(self) -> bool:
        """Whether this program saves here, as a member of whatever group."""
        return self._registry.joined(self.name) != ("", 0)

    def join(self, group: str, epoch: int) -> None:
        """From now on nothing is completed here that was saved in an earlier epoch. Raises: FencedError."""
        if (group, epoch) != self._registry.joined(self.name):
            self.fence.join(epoch, self.run_id)
            remove_left_overs(self.root, (epoch, 0), self.disk)
            self._registry.join(self.name, group, epoch)

    # --- slots --------------------------------------------------------------------------------------------------------

    def take(self, header: Header) -> HeldSlot:
        """A slot for tensors of this layout, for `hold`; a warm one where there is one.

        Raises:
            NotSavedError: there is no room for a new one.
        """
        self.reclaim()
        if not self.pool.is_warm(header):
            self.tidy()
        if not self.pool.is_warm(header) and (why := why_no_room(capacity_for(header), measure(self.root))) is not None:
            raise NotSavedError(why)
        try:
            return HeldSlot(self, self.pool.take(header))
        except CheckpointError as error:
            because = f"there is no room for a slot of {capacity_for(header)} bytes: {error}"
            raise NotSavedError(NotSaved("tmpfs", because)) from error

    def hold(self, held: HeldSlot, owner: Any) -> None:
        """Names the owner of a slot: when that is gone the save is over."""
        when_dropped(owner, self.end, held)

    def end(self, held: HeldSlot) -> None:
        """The save of a slot is over, also where its owner is still there: the traceback of an error keeps it, say."""
        self._over.append(held)

    def warm_bytes(self, needed_bytes: int) -> int:
        """How large the largest free slot is; what newer checkpoints have replaced is removed if that is needed."""
        if self.pool.largest_free_bytes() < needed_bytes:
            self.tidy()
        return self.pool.largest_free_bytes()

    def reclaim(self) -> None:
        """Sees to the slots whose saves are over."""
        while self._over:
            try:
                held = self._over.popleft()
            except IndexError:
                break  # another thread was quicker
            try:
                save = SaveId.parse(held.published.parent.name) if held.published is not None else None
                if save is None or not held.container.has_committed(save):
                    held.release()
            except CheckpointError as error:
                log.warning("a slot of %s cannot be used again: %s", self.root, error)

    # --- writing ------------------------------------------------------------------------------------------------------

    def next_generation(self, newest: int) -> int:
        """A generation above all that are known here and elsewhere; no two saves get the same.

        Args:
            newest: the highest that any rank knows.
        """
        with self._lock:
            self.generation = max(self.generation, newest) + 1
            return self.generation

    def begin(self, save: SaveId) -> None:
        """Removes what was received here of older saves that are over and have failed: no commit of theirs will."""
        with self._lock:
            for older in self.inventory():
                held = self.under_way.get(older.name)
                is_over = held is None or held.is_over
                if is_over and not older.is_committed and older.name < save:
                    for path, _ in self._shards(older.name):
                        self.shelf.delete(path)

    def publish(self, stage: Stage, header: Header | None, path: Path) -> Path:
        """Seals a stage and gives it its name; on any thread. Where it fails, the stage is given back.

        Args:
            stage: with all tensors copied.
            header: of the stage, with checksums and meta; None: it is sealed already.
            path: of a shard, or of another object in the container of a step.

        Raises:
            CheckpointError: the name is taken, or the disk refuses.
        """
        try:
            stage = self.pool.seal(stage, header) if header is not None else stage
            self.disk.make_folder(path.parent)
            self.pool.publish(stage, path)
        except BaseException:
            self.pool.release(stage)
            raise
        save = SaveId.find(path.parent.name)
        if save is not None:
            self._known.add(save)
        return path

    def write_commit(self, commit: Commit) -> Path:
        """Makes shards that all have their replicas a checkpoint on this host; returns where the commit lies.

        Raises:
            FencedError: who saved it was replaced.
            CheckpointError: the disk refuses; it is no checkpoint.
        """
        path = self.path_of(commit.shard)
        self.fence.check(*commit.name.token)
        self.disk.make_folder(path.parent)
        save_tree(path, content_of(commit), meta=meta_of(commit), disk=self.disk)
        self.complete(commit)
        return path

    def complete(self, commit: Commit, *, by_all: bool = False) -> None:
        """Makes a save a checkpoint on this host, whose commit is here: its attached files, and then the manifest.

        Args:
            commit: of shards that all have their replicas.
            by_all: all ranks have agreed on it, after those that saved it: the fence is not asked.

        Raises:
            FencedError: who saved it was replaced.
            CorruptCheckpointError: a shard that is here is not what the commit says.
            CheckpointError: the disk refuses; nothing has changed.
        """
        name = commit.name

        def check() -> None:
            if not by_all:
                self.fence.check(*name.token)

        check()  # before anything is read or written; and again between the files and their names
        with self._lock:  # what is complete here must not change between the look at it and the manifest
            folder, newest = self.root / name.folder_name, self.save_of(name.step)
            # The commit is the last of the shards: its own record is not in it, and is made from its file.
            manifest = commit.manifest(record_in(self.path_of(commit.shard), commit.shard.rank))
            if not by_all:  # else what is needed here was read, and another damaged copy is no reason to give up
                for record in manifest.found_in(sizes_in(folder))[0]:
                    require_stored(folder, record)
            # where the step was saved anew meanwhile, its attached files are those of the newer save
            extras = commit.extras if newest is None or newest <= name else {}
            self._publish_manifest(manifest, extras, check)

    def _publish_manifest(self, manifest: Manifest, extras: Mapping[str, bytes], check: Callable[[], object]) -> None:
        name, beside = manifest.name, self.folder_of(manifest.name.step)
        staging = self.root / name.staging_name
        self.disk.make_folder(beside)
        remove_folder(self.root, name.staging_name, self.disk)  # a process that was killed may have begun it
        try:
            self.disk.make_folder(staging)
            for file, content in extras.items():
                write_whole(staging / file, [memoryview(content)], self.disk)
            write_manifest(staging, manifest, self.disk)
            check()
            # From here the fence may still rise. Whoever raises it takes older hidden folders away: the renames fail.
            for file in extras:
                self.disk.rename(staging / file, beside / file)
            self.disk.rename(staging / MANIFEST_NAME, self.root / name.folder_name / MANIFEST_NAME)
        except CheckpointError:
            check()
            raise
        finally:
            with suppress(CheckpointError):  # a left-over, as of a process that was killed
                remove_folder(self.root, name.staging_name, self.disk)

    # --- reading ------------------------------------------------------------------------------------------------------

    def inventory(self) -> list[TierEntry]:
        """See `Tier`; in one look: no other thread replaces a checkpoint meanwhile."""
        with self._lock:
            return super().inventory()

    def read_commit(self, shard: ShardId) -> Commit:
        """The commit of a save. Raises: CorruptCheckpointError if it is not here, or damaged."""
        with self.open(shard.name, shard.rank) as opened:
            return _commit_in(opened)

    def save_of(self, step: int) -> SaveId | None:
        """The newest save of a step that is complete here."""
        return next((one.name for one in self.inventory() if one.is_committed and one.name.step == step), None)

    def commit_shard(self, name: SaveId) -> ShardId:
        """Which shard is the commit of a save that is complete here. Raises: CorruptCheckpointError if it is not."""
        count = read_manifest(self.root / name.folder_name).world_size
        return ShardId(name, count - 1, count)

    def has_committed(self, name: SaveId) -> bool:
        """Whether a save is complete, as far as this host knows."""
        return (self.root / name.folder_name / MANIFEST_NAME).exists()

    def newest(self) -> SaveId | None:
        """The newest checkpoint that is complete here."""
        return next((entry.name for entry in self.inventory() if entry.is_committed), None)

    # --- removing -----------------------------------------------------------------------------------------------------

    def tidy(self) -> list[int]:
        """Removes what the newest checkpoint has replaced, as `prune` does; on any thread.

        Returns:
            The steps that are gone.
        """
        with self._lock:
            removed = self.prune()
            left = {name.step for name in map(SaveId.find, names_in(self.root)) if name is not None}
            return sorted({name.step for name in removed} - left)

    def remove(self, step: int) -> None:
        """Removes a step as far as it is this process's to remove; it is no checkpoint any more. It may be gone.

        Raises:
            CheckpointError: the disk refuses.
        """
        with self._lock:
            self._delete([entry.name for entry in self.inventory() if entry.name.step == step])
            self._remove_attached(step)

    def delete_newer(self, save: SaveId) -> None:
        """What is newer than the chosen save, and could not be put together, is none any more: it would replace that.

        Raises:
            CheckpointError: the disk refuses.
        """
        for entry in self.inventory():
            if entry.is_committed and entry.name > save:
                self._delete_manifest(entry.name)

    def _may_remove(self, name: SaveId, rank: int, path: Path) -> bool:  # noqa: ARG002 - `_delete_file` looks who holds it
        return True

    def remove_object(self, path: Path) -> None:
        """Removes one file of a checkpoint, unless another process uses it. Raises: CheckpointError."""
        if self.pool.holds(path):
            self.pool.delete(path)
        elif not self.shelf.delete(path):
            with lock_of_nobody(path) as is_left_over:
                if is_left_over:
                    self.disk.remove(path)

    def _delete_file(self, path: Path) -> None:
        self.remove_object(path)

    def _remove_if_empty(self, name: SaveId) -> None:
        super()._remove_if_empty(name)
        names = filter(None, map(SaveId.find, names_in(self.root)))
        if all(other.step != name.step for other in names):
            self._remove_attached(name.step)

    def _remove_attached(self, step: int) -> None:
        """Removes the container of a step, unless something in it is in use."""
        folder = self.folder_of(step)
        for name in names_in(folder):
            self.remove_object(folder / name)
        with explained("remove a checkpoint", folder):
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # somebody writes there, or it is gone
                    raise

    def remove_all(self) -> None:
        """Removes the whole folder with everything in it: the job is over. Slots of this process are given back."""
        self.close()
        self.disk.remove_folder(self.root)


def read_commit(folder: Path) -> Commit:
    """The commit of a complete save, compared with its manifest.

    Args:
        folder: of the save; its container need not be claimed.

    Raises:
        CorruptCheckpointError: there is none, or it is damaged.
        CheckpointError: it cannot be read.
    """
    with open_shard(folder, read_manifest(folder).shards[-1]) as shard:
        return _commit_in(shard)


def _commit_in(shard: ShardReader) -> Commit:
    try:
        return commit_from(shard.header.meta, unflatten(shard.header.structure, shard.read()))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{shard.path}: {error}") from error
