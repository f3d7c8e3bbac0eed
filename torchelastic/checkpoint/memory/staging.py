"""The share of one rank, in a slot: from here on it is written without the training thread, and without its tensors."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from torch.distributed.checkpoint.storage import WriteResult

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory.commit import StoredItem
from torchelastic.checkpoint.memory.items import (
    Resolved,
    entries_in_place,
    entries_of_pickles,
    header_bytes,
)
from torchelastic.checkpoint.memory.names import ObjectName, ShardName
from torchelastic.checkpoint.memory.plans import NotSaved, NotSavedError
from torchelastic.checkpoint.memory.slots import Held, Slots, mapped
from torchelastic.checkpoint.memory.staged_state import Copied, copy_into
from torchelastic.checkpoint.replication.errors import ReplicationError
from torchelastic.checkpoint.shards.batches import DEFAULT_THREADS, over_batches
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.shards.header import (
    ALIGNMENT_BYTES,
    PREAMBLE_BYTES,
    Entry,
    Header,
    align,
    encode_header,
    encode_preamble,
)
from torchelastic.checkpoint.shards.reading import ShardReader

if TYPE_CHECKING:
    from torchelastic.checkpoint.replication.manager import ReplicationManager

_PUBLISH_ATTEMPTS = 50
_REASONS = {errno.ENOSPC: "tmpfs", errno.EDQUOT: "tmpfs", errno.ENOMEM: "ram"}


@dataclass(frozen=True)
class Target:
    """Where a shard goes.

    Attributes:
        root: the container, on this host.
        step: of the checkpoint.
        name: of the shard.
    """

    root: Path
    step: int
    name: ShardName

    @property
    def path(self) -> Path:
        """Its file, once it is published."""
        return self.root / f"step-{self.step}_ckpt" / str(self.name)

    @property
    def object_id(self) -> str:
        """What the other hosts call it."""
        return str(ObjectName(self.root.name, self.step, str(self.name)))


@dataclass(eq=False)
class StagedItems:
    """One rank's share of a save: copied, so that the state may change, and not yet a shard.

    It pickles to what another process of this host needs to write it, and it may be written after a fork.

    Attributes:
        results: for DCP: where each item will lie.
        target: where the shard goes.
        path: the slot's file; None if this rank has nothing to write.
        data_offset: where the data begin in it.
        header: of the shard, without checksums.
        checksums: of the entries, if they are known.
        disk: what touches files.
        threads: how many compute checksums.
        replication: sends it to the partners; None: nobody does.
        held: the slot, in the process that owns it.
    """

    results: list[WriteResult]
    target: Target
    path: Path | None
    data_offset: int
    header: Header
    checksums: Sequence[str] | None
    disk: Disk
    threads: int = DEFAULT_THREADS
    replication: ReplicationManager | None = None
    held: Held | None = field(default=None, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": None, "_pid": -1, "header": replace(self.header, meta=dict(self.header.meta))}

    def write(self) -> None:
        """Computes checksums, gives the shard its name and sends it to the partners; when this returns, they have it.

        On any thread, or in another process of this host (then `adopt` it in the one that staged it). Once.

        Raises:
            ReplicationError: a partner does not take it. The shard is removed here.
            CheckpointError: the disk refuses.
        """
        if self.path is None:
            return
        self._publish(self.path)
        try:
            self._push()
        except BaseException:
            self._withdraw(self.path)
            raise

    def adopt(self) -> None:
        """In the process that staged it: another one has written it. Raises: CheckpointError if it has not."""
        held = self.held
        if self.path is None:
            return
        if held is None or held.stage is None:
            raise CheckpointError(f"{self.target.path} was given back, or belongs to another process")
        if held.published is None:
            try:
                is_there = self.target.path.exists() and not self.path.exists()
            except OSError:
                is_there = False
            if not is_there:
                raise CheckpointError(f"{self.target.path} was not written: see the log of the process that had to")
            held.container.adopt(held.stage, self.target.step, self.target.name)
            held.published = self.target.path

    def abandon(self) -> None:
        """Instead of `write`, or after it: there will be no such checkpoint; the slot is free again."""
        if self.path is None or self.held is None:
            return
        if self.held.published is None and self.held.stage is not None and self.target.path.exists():
            self.adopt()
        self.held.give_back()

    def _view(self) -> memoryview:
        if self.held is not None and self.held.stage is not None:
            return self.held.stage.slot.view()
        return memoryview(mapped(self.path if self.path is not None else self.target.path).numpy())  # type: ignore[arg-type]

    def _publish(self, path: Path) -> None:
        view = self._view()
        begin, entries = self.data_offset, self.header.entries

        def work(batch: range) -> list[str]:
            return [
                f"{xxhash.xxh3_64_intdigest(view[begin + e.offset_bytes : begin + e.offset_bytes + e.size_bytes]):016x}"
                for e in entries[batch.start : batch.stop]
            ]

        checksums = self.checksums or over_batches(entries, work, self.threads)
        header = self.header.with_checksums(checksums)
        held = self.held
        if held is not None and held.stage is not None and self._pid == os.getpid():
            stage, held.stage = held.stage, None  # `publish` gives it back where it fails
            held.published = held.container.publish(stage, header, self.target.step, self.target.name)
            held.stage = stage
            return
        encoded = encode_header(header)
        self.disk.store(view, PREAMBLE_BYTES, encoded)
        self.disk.store(view, 0, encode_preamble(encoded, begin, header.data_bytes))
        self._rename(path)

    def _rename(self, path: Path) -> None:
        for attempt in range(_PUBLISH_ATTEMPTS):
            self.disk.make_folder(self.target.path.parent)
            try:
                self.disk.rename(path, self.target.path)
                return
            except CheckpointError as error:
                # another rank, tidying up, has removed the folder of this step in the moment when it was empty
                is_lost = error.errno == errno.ENOENT and path.exists()
                if not is_lost or attempt == _PUBLISH_ATTEMPTS - 1:
                    raise

    def _push(self) -> None:
        if self.replication is None or not self.replication.partners:
            return
        held = self.held
        with ShardReader(self.target.path) as shard:  # locked while it is sent
            # a new mapping of the file would cost a page fault per page
            is_mapped = held is not None and held.stage is not None and self._pid == os.getpid()
            view = self._view()[: shard.size_bytes] if is_mapped else shard.view()
            with view as content:
                self.replication.push(self.target.object_id, content)

    def _withdraw(self, path: Path) -> None:
        try:
            if self.held is not None and self._pid == os.getpid():
                self.held.give_back()
            else:
                self.disk.rename(self.target.path, path)  # the owner finds it where it was
        except CheckpointError:
            pass  # the first error is the one to see


def stage_items(
    resolved: Resolved,
    target: Target,
    slots: Slots,
    meta: dict[str, Any],
    *,
    owner: Any,
    replication: ReplicationManager | None,
    threads: int,
    with_checksums: bool,
) -> StagedItems:
    """Copies what a plan writes into a slot.

    Args:
        resolved: the items.
        target: where they go.
        slots: of the container.
        meta: for the header.
        owner: when it is gone the save is over; None: that is the object that is returned.
        replication: sends the shard to the partners.
        threads: how many copy.
        with_checksums: compute them on the way: for a caller that waits for them anyway.

    Raises:
        NotSavedError: there is no room.
    """
    disk = slots.container.disk
    if not resolved.names:
        return StagedItems([], target, None, 0, Header(None, ()), (), disk)
    layout = slots.items.lay_out(resolved)
    held = slots.take(layout, owner)
    stage = held.stage
    assert stage is not None
    try:
        tensors = [tensor for _, tensor in resolved.tensors]
        pickled = entries_of_pickles(resolved, layout.entries[-1])
        header = Header(None, (*layout.entries[:-1], *pickled), meta)
        checksums: list[str] | None = None
        if with_checksums and not any(tensor.is_cuda for tensor in tensors):
            tensors_only = replace(stage, header=Header(None, layout.entries[:-1]), places=stage.places[:-1])
            checksums = tensors_only.copy_and_hash(tensors, threads)
        else:
            copy_into(stage, tensors)
        digests = _store_pickles(resolved, pickled, stage.slot.view(), stage.data_offset, disk)
        path = stage.slot.path
        results = _results(resolved, header, resolved.names, target)
        stage.slot.share()
        staged = StagedItems(results, target, path, stage.data_offset, header, None, disk, threads, replication, held)
        staged.checksums = (*checksums, *digests) if checksums is not None else None
    except BaseException:
        held.give_back()
        raise
    if owner is None:
        slots.hold(held, staged)
    return staged


def items_of_copy(
    resolved: Resolved,
    copied: Copied,
    target: Target,
    slots: Slots,
    meta: dict[str, Any],
    *,
    replication: ReplicationManager | None,
    threads: int,
) -> StagedItems | None:
    """The same for a state that was copied already, if the plan writes exactly what is in the copy: none is made.

    Returns:
        None if it writes something else, or if the copy does not lie where it can become a shard: use `stage_items`.
    """
    data_begin = copied.memory.data_ptr() + copied.data_offset
    found = entries_in_place(resolved, copied.layout, data_begin)
    room = copied.layout.entries[-1]
    slots.copies.needed(resolved.pickled_bytes)
    if found is None or resolved.pickled_bytes > room.size_bytes or not _same_file_system(copied.path, target.root):
        return None
    entries, tensor_names = found
    pickled = entries_of_pickles(resolved, room)
    full = [entry for entry in entries if entry.size_bytes]
    end = max((entry.offset_bytes + entry.size_bytes for entry in (*full, *pickled)), default=0)
    empty = [replace(e, offset_bytes=align(end, ALIGNMENT_BYTES)) for e in entries if not e.size_bytes]
    header = Header(None, (*full, *pickled, *empty), meta)
    if PREAMBLE_BYTES + header_bytes(header) > copied.data_offset:
        return None
    held, disk = copied.held, slots.container.disk
    assert held.stage is not None
    _store_pickles(resolved, pickled, held.stage.slot.view(), copied.data_offset, disk)
    names = [*tensor_names, *resolved.names[len(resolved.tensors) :]]
    results = _results(resolved, header, names, target)
    copied.is_consumed = True
    held.container = slots.container  # the copy may have been made before the container was known
    return StagedItems(results, target, copied.path, copied.data_offset, header, None, disk, threads, replication, held)


def push_shard(path: Path, object_id: str, replication: ReplicationManager) -> int:
    """Sends a published shard to the partners; returns how many copies there are then.

    Raises:
        ReplicationError: a partner has none.
        CheckpointError: the shard cannot be read.
    """
    with ShardReader(path) as shard, shard.view() as content:
        return replication.push(object_id, content)


def why_not(error: CheckpointError, rank: int) -> NotSaved:
    """What a save is left out for."""
    if isinstance(error, NotSavedError):
        return replace(error.why, rank=rank)
    if isinstance(error, ReplicationError):
        return NotSaved("replica", str(error), rank)
    return NotSaved(_REASONS.get(error.errno or 0, "disk"), str(error), rank)


def _store_pickles(
    resolved: Resolved, entries: Sequence[Entry], view: memoryview, data_offset: int, disk: Disk
) -> list[str]:
    for (_, content), entry in zip(resolved.pickles, entries, strict=True):
        disk.store(view, data_offset + entry.offset_bytes, bytes(content))
    return [f"{xxhash.xxh3_64_intdigest(content):016x}" for _, content in resolved.pickles]


def _results(resolved: Resolved, header: Header, names: Sequence[str], target: Target) -> list[WriteResult]:
    size_of = {entry.name: entry.size_bytes for entry in header.entries}
    file = str(target.name)
    return [
        WriteResult(item.index, size_of[name], StoredItem(file, name))
        for item, name in zip(resolved.items, names, strict=True)
    ]


def _same_file_system(path: Path, root: Path) -> bool:
    try:
        return path.stat().st_dev == root.stat().st_dev
    except OSError:
        return False
