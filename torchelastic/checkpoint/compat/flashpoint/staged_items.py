"""The share of one rank, in a slot: from here on it is written without the training thread, and without its tensors."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from torchelastic.checkpoint.compat.flashpoint.commit import StoredItem
from torchelastic.checkpoint.compat.flashpoint.container import Container, HeldSlot
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId, meta_of_shard, object_of
from torchelastic.checkpoint.compat.flashpoint.items import Resolved, entries_in_place, entries_of_pickles
from torchelastic.checkpoint.compat.flashpoint.plans import CoordinatorDecision, NotSavedError
from torchelastic.checkpoint.compat.flashpoint.staged_state import find_copy, mapped, tensors_only
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.batches import DEFAULT_THREADS, checksum_of
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import ALIGNMENT_BYTES, Entry, Header, align
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.stage import Stage, read_header, seal
from torchelastic.checkpoint.replicas.replication_errors import UNREACHABLE, ReplicationError
from torchelastic.checkpoint.store.host_memory.room import NotSaved
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.reading import record_of, require_shard
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.metrics import publish_metric

if TYPE_CHECKING:
    from torchelastic.checkpoint.engine.durable_copies import DurableCopies
    from torchelastic.checkpoint.replicas.replication_manager import ReplicationManager

log = logging.getLogger(__name__)

_REASONS = {errno.ENOSPC: "tmpfs", errno.EDQUOT: "tmpfs", errno.ENOMEM: "ram"}


@dataclass(eq=False)
class StagedItems:
    """One rank's share of a save: copied, so that the state may change, and not yet a shard.

    It pickles to what another process of this host needs to write it, and it may be written after a fork. Only the
    process that staged it gives the shard its name, so that nobody else ever has to find out where its slot went.

    Attributes:
        results: for DCP: where each item will lie; and, once the shard has its name, what the manifest says of it.
        shard: which it is.
        target: its file, once it has its name.
        path: the slot's file.
        data_offset: where the data begin in it.
        header: of the shard; checksums that it lacks are computed by `write`.
        disk: what touches files.
        threads: how many compute checksums.
        replication: sends it to the partners; None: nobody does.
        needs_replicas: whether there is no save without all replicas.
        held: the slot, in the process that owns it.
        copies: where it is copied to besides, there.
    """

    results: list[WriteResult]
    shard: ShardId
    target: Path
    path: Path
    data_offset: int
    header: Header
    disk: Disk
    threads: int = DEFAULT_THREADS
    replication: ReplicationManager | None = None
    needs_replicas: bool = True
    held: HeldSlot | None = field(default=None, repr=False)
    copies: DurableCopies | None = field(default=None, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "held": None,
            "copies": None,
            "_pid": -1,
            "header": replace(self.header, meta=dict(self.header.meta)),
        }

    def write(self) -> None:
        """Computes checksums, sends the shard to the partners, and gives it its name; when this returns, they have it.

        On any thread, or in another process of this host: then `adopt` gives it its name, in the one that staged it.
        Once.

        Raises:
            ReplicationError: a partner does not take it, and it `needs_replicas`.
            CheckpointError: the disk refuses.
        """
        is_own = self.held is not None and self._pid == os.getpid()
        try:
            with self._view() as view:
                end = seal(view, self.header, self.data_offset, self.disk, self.threads)
                with view[:end] as content:
                    self._replicate(content)
            if is_own:
                self.adopt()
        except BaseException:
            if is_own:
                self.abandon()
            raise

    def _replicate(self, content: memoryview) -> None:
        if self.replication is None or not self.replication.partners:
            return
        try:
            self.replication.push(object_of(self.target.parent.parent.name, self.shard), content)
        except ReplicationError as error:
            if self.needs_replicas or not isinstance(error.__cause__, UNREACHABLE):
                raise
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            log.warning("%s is saved without: %s", self.shard, error)

    def adopt(self) -> None:
        """In the process that staged it: publishes what another one has written, and tells `results` of it.

        Raises:
            CheckpointError: it was not written, or the disk refuses.
        """
        held = self.held
        if held is None or held.stage is None:
            raise CheckpointError(f"{self.target} was released, or belongs to another process")
        if held.published is not None:
            return
        with held.stage.slot.view() as view:
            try:
                written, _ = read_header(view, str(self.target))
            except CorruptCheckpointError as error:
                raise CheckpointError(
                    f"{self.target} was not written: see the log of the process that had to"
                ) from error
            record = record_of(view, self.shard.rank, self.target.name)
        require_shard(self.shard, written.meta, str(self.target))
        held.publish(self.target)
        if self.copies is not None:
            self.copies.take(self.shard, ShardReader(self.target))
        self.results.append(result_of(record))

    def abandon(self) -> None:
        """Instead of `write`, or after it: there will be no such checkpoint; the slot is free again."""
        if self.held is not None:
            self.held.release()

    def _view(self) -> memoryview:
        if self.held is None:
            return memoryview(mapped(self.path).numpy())  # type: ignore[arg-type]
        if self.held.stage is None:
            raise CheckpointError(f"{self.target} was released")
        return self.held.stage.slot.view()


@dataclass(eq=False)
class PlannedSave:
    """One save, on one rank.

    Attributes:
        id: the container of the checkpoint.
        step: its step.
        base: the container of the job.
        rank: among those that save, if DCP tells.
        extras: files that are attached.
        decision: what the coordinator has decided.
    """

    id: CheckpointContainerId
    step: int
    base: CheckpointContainerId
    rank: int | None = None
    extras: dict[str, bytes] = field(default_factory=dict)
    decision: CoordinatorDecision | None = None

    @property
    def about(self) -> str:
        """What all hosts call the checkpoint."""
        return f"{self.base.name}/{self.id.name}"


#: Where the items of a plan lie: the slot, the header of the shard (with checksums, if they are known), and the name of
#: the entry of each item, in the order of `Resolved.items`.
_Placed = tuple[HeldSlot, Header, Sequence[str]]


def stage_items(
    resolved: Resolved, shard: ShardId, container: Container, *, threads: int, with_checksums: bool
) -> StagedItems:
    """Copies what a plan writes into a slot; if it is exactly what was copied with a state, that copy is the shard.

    A rank that has nothing to write has an empty shard, so that a checkpoint always has one of each rank.

    Args:
        resolved: the items.
        shard: what they become.
        container: of the job.
        threads: how many copy.
        with_checksums: compute them on the way: for a caller that waits for them anyway.

    Raises:
        NotSavedError: there is no room.
    """
    copied = find_copy([tensor for _, tensor in resolved.tensors])
    placed = _in_copy(resolved, copied, shard, container) if copied is not None else None
    held, header, names = placed or _in_slot(resolved, shard, container, threads, with_checksums=with_checksums)
    container.under_way[shard.name] = held
    assert held.stage is not None
    assert held.stage.slot.path is not None
    size_of = {entry.name: entry.size_bytes for entry in header.entries}
    staged = StagedItems(
        [
            WriteResult(item.index, size_of[name], StoredItem(str(shard), name))
            for item, name in zip(resolved.items, names, strict=True)
        ],
        shard,
        container.path_of(shard),
        held.stage.slot.path,
        held.stage.data_offset,
        header,
        container.disk,
        threads,
        held=held,
    )
    if placed is None:  # else the copy of the state holds it
        container.hold(held, staged)
    return staged


def _in_slot(
    resolved: Resolved, shard: ShardId, container: Container, threads: int, *, with_checksums: bool
) -> _Placed:
    """Copies all items; arguments and errors as `stage_items`."""
    layout = container.item_layout.of_items(resolved)
    held = container.take(layout)
    stage = held.stage
    assert stage is not None
    try:
        tensors = [tensor for _, tensor in resolved.tensors]
        pickled = entries_of_pickles(resolved, layout.entries[-1])
        checksums: list[str] | None = None
        if with_checksums:
            checksums = tensors_only(stage).copy_and_hash(tensors, threads)
        else:
            tensors_only(stage).copy(tensors)
        digests = _store_pickles(resolved, pickled, stage)
    except BaseException:
        held.release()
        raise
    header = Header(None, (*layout.entries[:-1], *pickled), meta_of_shard(shard))
    if checksums is not None:
        header = header.with_checksums((*checksums, *digests))
    return held, header, resolved.names


def _in_copy(resolved: Resolved, copied: HeldSlot, shard: ShardId, container: Container) -> _Placed | None:
    """The copy of a state itself, if the plan writes exactly what is in it, and it lies where it can become a shard."""
    container.copy_layout.needed(resolved.pickled_bytes)
    stage = copied.stage
    assert stage is not None
    found = entries_in_place(resolved, stage.header, stage.slot.memory.data_ptr() + stage.data_offset)
    room = stage.header.entries[-1]
    is_too_long = resolved.pickled_bytes > room.size_bytes
    if found is None or is_too_long or not _same_file_system(stage.slot.path, container.root):
        return None
    entries, tensor_names = found
    pickled = entries_of_pickles(resolved, room)
    full = [entry for entry in entries if entry.size_bytes]
    end = max((entry.offset_bytes + entry.size_bytes for entry in (*full, *pickled)), default=0)
    empty = [structs.replace(e, offset_bytes=align(end, ALIGNMENT_BYTES)) for e in entries if not e.size_bytes]
    header = Header(None, (*full, *pickled, *empty), meta_of_shard(shard))
    if not stage.has_room_for(header):
        return None
    _store_pickles(resolved, pickled, stage)
    copied.is_used = True
    copied.container = container  # the copy may have been made before the container was known
    return copied, header, [*tensor_names, *resolved.names[len(resolved.tensors) :]]


def result_of(record: ShardRecord) -> WriteResult:
    """What tells the coordinator of a shard that was written, beside the results for its items."""
    return WriteResult(MetadataIndex(record.file), record.size_bytes, record)


def why_not(error: CheckpointError, rank: int) -> NotSaved:
    """What a save is left out for."""
    if isinstance(error, NotSavedError):
        return replace(error.why, rank=rank)
    if isinstance(error, ReplicationError):
        return NotSaved("replica", str(error), rank)
    return NotSaved(_REASONS.get(error.errno or 0, "disk"), str(error), rank)


def _store_pickles(resolved: Resolved, entries: Sequence[Entry], stage: Stage) -> list[str]:
    for (_, content), entry in zip(resolved.pickles, entries, strict=True):
        stage.slot.store(stage.data_offset + entry.offset_bytes, bytes(content))
    return [checksum_of(content) for _, content in resolved.pickles]


def _same_file_system(path: Path | None, root: Path) -> bool:
    try:
        return path is not None and path.stat().st_dev == root.stat().st_dev
    except OSError:
        return False
