"""The slots of one folder: taken for a save, published as a checkpoint, and free again when that is removed.

A folder that keeps n checkpoints comes to n + 1 slots, or n + 2 where a save may begin while the one before is still
being finished, and one more for each that `pin` keeps; after that nothing is allocated any more. What more there was
for a while goes back to the system.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import HIDDEN, REAL_DISK, Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.shard_writing import hidden_path
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.checkpoint.format.stage import Stage, capacity_for
from torchelastic.processes.file_locks import lock_of_nobody

log = logging.getLogger(__name__)

#: How much longer than what it is taken for a slot may be, beside as long again: small states differ.
_SPARE_BYTES = 4 * 2**20
#: After so many slots were taken, and two for each that the pool has, those that were never needed are given back.
_LEAST_ROUND = 16


class SlotPool:
    """Slots on one folder, or in anonymous memory; may be used by several threads.

    Args:
        folder: where the files are, on tmpfs to be fast; made again where somebody has removed it. None: memory without
            files, which cannot be published.
        at_once: memory that the pool releases goes back to the system at once, see `Slot.release_at_once`.
        disk: what touches files.
    """

    def __init__(self, folder: Path | None, *, at_once: bool = False, disk: Disk = REAL_DISK) -> None:
        self.folder = folder
        self._at_once = at_once
        self._disk = disk
        self._lock = threading.Lock()
        self._free: list[Stage] = []
        self._published: dict[Path, Stage] = {}
        self._pinned: set[Slot] = set()
        self._deleted: list[Stage] = []
        self._closed = False
        self._taken, self._unneeded = 0, 0

    def take(self, header: Header) -> Stage:
        """Returns a stage for tensors of this layout, hidden and not in use; a warm one where there is one.

        Raises:
            CheckpointError: a new slot is needed, and there is no room for it.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the pool of slots is closed")
            stage = self._stage(header)
            self._release_unneeded()
            return stage

    def keep_warm(self, header: Header) -> None:
        """Has a stage free for the next `take` of tensors of this layout; not after `close`. Raises: as `take`."""
        with self._lock:
            if not self._closed:
                stage = self._stage(header)
                self._free.append(stage)

    def _stage(self, header: Header) -> Stage:
        stage = self._warm(header)
        if stage is not None:
            return stage
        return self._new(header)

    def _new(self, header: Header) -> Stage:
        try:
            return self._allocated(header)
        except CheckpointError as error:
            if self.folder is None or error.errno != errno.ENOENT:
                raise
        log.warning("%s was removed from outside: it is made again", self.folder)
        self._disk.make_folder(self.folder)
        return self._allocated(header)

    def _allocated(self, header: Header) -> Stage:
        path = hidden_path(self.folder) if self.folder else None
        return Stage.prepare(Slot(capacity_for(header), path, disk=self._disk), header)

    def _release_unneeded(self) -> None:
        self._taken, self._unneeded = self._taken + 1, min(self._unneeded, len(self._free))
        if self._taken > _LEAST_ROUND + 2 * (len(self._free) + len(self._published)):
            for stage in self._free[: self._unneeded]:
                self._release_memory(stage)
            del self._free[: self._unneeded]
            self._taken, self._unneeded = 0, len(self._free)

    def _warm(self, header: Header) -> Stage | None:
        self._free = [stage for stage in self._free if not _is_gone(stage.slot)]
        self._published = {path: stage for path, stage in self._published.items() if not _is_gone(stage.slot)}
        for stage in self._free:
            if stage.fits(header):
                self._free.remove(stage)
                return stage
        needed_bytes = capacity_for(header)
        most_bytes = 2 * needed_bytes + _SPARE_BYTES
        roomy = [stage for stage in self._free if needed_bytes <= stage.slot.capacity_bytes <= most_bytes]
        if roomy:
            chosen = min(roomy, key=lambda stage: stage.slot.capacity_bytes)
            self._free.remove(chosen)
            return Stage.prepare(chosen.slot, header)
        self._release_free_memory()  # too small for what is saved now, or far too large
        return None

    def is_warm(self, header: Header) -> bool:
        """Whether `take` needs no more memory than there is for tensors of this layout."""
        if any(stage.fits(header) for stage in list(self._free)):
            return True
        free_bytes = self.largest_free_bytes()
        return free_bytes > 0 and free_bytes >= capacity_for(header)  # which takes its time with a long header

    def largest_free_bytes(self) -> int:
        """How large the largest free slot is; 0 if there is none."""
        with self._lock:
            return max((stage.slot.capacity_bytes for stage in self._free), default=0)

    def seal(self, stage: Stage, header: Header) -> Stage:
        """Seals a stage that was taken; for the background, on any thread.

        Args:
            stage: with all tensors copied.
            header: see `Stage.seal`.

        Returns:
            The stage that was sealed: this one, or a larger one where the header has outgrown its slot.

        Raises:
            CheckpointError: a larger slot is needed, and there is no room for it; the stage is still held.
        """
        if stage.has_room_for(header):
            stage.seal(header)
            return stage
        larger = self.seal_copy(stage, header)
        self.release_memory(stage)
        return larger

    def seal_copy(self, stage: Stage, header: Header) -> Stage:
        """The same in a new slot; the stage, which may be of another pool, is still held. Raises: as `seal`."""
        larger = self._new(header)
        larger.copy(stage.places)
        larger.seal(header)
        return larger

    def publish(self, stage: Stage, target: Path) -> None:
        """Gives a sealed stage its name. Raises: CheckpointError if the name is taken; the stage is then still held."""
        stage.slot.publish(target)
        with self._lock:
            self._published[target] = stage

    def adopt(self, stage: Stage, target: Path) -> None:
        """The stage has its name already: another process gave it, on behalf of this one."""
        stage.slot.was_published(target)
        with self._lock:
            self._published[target] = stage

    def holds(self, path: Path) -> bool:
        """Whether this is a shard that was published here."""
        with self._lock:
            return path in self._published

    def release(self, stage: Stage) -> None:
        """A stage that was taken is free again, its content of no worth; after `close` it is given back at once."""
        with self._lock:
            self._put_back(stage)

    def _put_back(self, stage: Stage) -> None:
        if self._closed:
            self._release_memory(stage)
        else:
            self._free.append(stage)

    def pin(self, stage: Stage) -> None:
        """Nobody writes into a stage before `unpin`, also when its shard was published and is removed meanwhile."""
        with self._lock:
            self._pinned.add(stage.slot)

    def unpin(self, stage: Stage) -> None:
        """What is read of a stage is no more; once it was removed it is free."""
        with self._lock:
            self._pinned.discard(stage.slot)
            for deleted in [one for one in self._deleted if one.slot is stage.slot]:
                self._deleted.remove(deleted)
                self._put_back(deleted)

    def release_memory(self, stage: Stage) -> None:
        """A stage that was taken is given back to the system, and not used again."""
        with self._lock:
            self._release_memory(stage)

    def release_free_memory(self) -> None:
        """Gives the memory of all free slots back to the system."""
        with self._lock:
            self._release_free_memory()

    def delete(self, path: Path) -> None:
        """Removes a published shard, whoever made it; its slot is free again if it is ours and nobody reads it.

        Raises:
            CheckpointError: it cannot be removed (one that is gone already is no error).
        """
        with self._lock:
            stage = self._published.pop(path, None)
            if stage is None or self.folder is None or _is_gone(stage.slot):
                self._disk.remove(path)  # whatever has this name
                return
            try:
                is_free = stage.slot.withdraw(hidden_path(self.folder))
            except CheckpointError as error:
                if error.errno != errno.ENOENT:
                    self._published[path] = stage  # still there, and still ours
                    raise
                log.warning("the checkpoint %s was removed by somebody else", path)
                stage.slot.close()
                return
            if not is_free:
                self._release_memory(stage)
            elif stage.slot in self._pinned:
                self._deleted.append(stage)
            else:
                self._free.append(stage)

    def close(self) -> None:
        """Gives all memory back; published files stay, hidden ones go, those in use as soon as they are given back."""
        with self._lock:
            self._closed = True
            for stage in self._published.values():
                stage.slot.close()
            self._published.clear()
            self._release_free_memory()

    def _release_free_memory(self) -> None:
        for stage in self._free:
            self._release_memory(stage)
        self._free.clear()

    def _release_memory(self, stage: Stage) -> None:
        path = stage.slot.path
        try:
            if path is not None:
                self._disk.remove(path)  # while it is locked: nobody takes it for a left-over
        except CheckpointError as error:  # whoever uses the folder next removes what is hidden
            log.warning("memory of a checkpoint stays taken: %s", error)
        finally:
            if self._at_once:
                stage.slot.release_at_once()
            else:
                stage.slot.close()


def _is_gone(slot: Slot) -> bool:
    """Whether its file is not there any more; then its memory is given back."""
    if not slot.is_gone:
        return False
    slot.close()
    return True


def remove_left_overs(folder: Path, disk: Disk = REAL_DISK) -> int:
    """Removes hidden files whose writer is dead (it would hold their lock), and returns how many.

    Safe while others write into the same folder on this host; on a file system that several hosts share it is, if that
    passes locks on (NFS version 4, Lustre with -o flock).
    """
    removed = 0
    for path in _hidden_files(folder):
        with lock_of_nobody(path) as is_left_over:
            if is_left_over:
                try:
                    disk.remove(path)
                    removed += 1
                except CheckpointError:
                    pass  # the folder is read-only
    return removed


def _hidden_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(HIDDEN) and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []  # no such folder, or not ours: nothing of ours is in it
