"""Saves into memory: the place where the work is done. `writer.MemoryStorageWriter` is what DCP sees of it."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchelastic.checkpoint.compat.flashpoint.commit import (
    Commit,
    StoredItem,
    check_extra_name,
    records_of,
    storage_data_of,
)
from torchelastic.checkpoint.compat.flashpoint.ids import (
    CheckpointContainerId,
    CheckpointObjectId,
    object_of,
    parts_of,
    shard_of,
)
from torchelastic.checkpoint.compat.flashpoint.items import resolve
from torchelastic.checkpoint.compat.flashpoint.object_manager import SaverContainers
from torchelastic.checkpoint.compat.flashpoint.plans import (
    CoordinatorDecision,
    NotSavedError,
    RankReport,
    collect_decision,
    collect_reports,
    deliver,
    epoch_of,
    shares_bytes,
    tensor_bytes,
    why_skipped,
)
from torchelastic.checkpoint.compat.flashpoint.skipping import SkippedSaves
from torchelastic.checkpoint.compat.flashpoint.staged_items import PlannedSave, StagedItems, stage_items, why_not
from torchelastic.checkpoint.compat.flashpoint.staged_state import (
    StagedState,
    TakenApart,
    copied_bytes,
    not_staged,
    skip_mark_in,
    staged_in,
)
from torchelastic.checkpoint.errors import CheckpointError, FencedError
from torchelastic.checkpoint.format.batches import DEFAULT_THREADS
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.store.host_memory.room import NotSaved, measure
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierContext
from torchelastic.processes.background import in_background

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.flashpoint.object_manager import CheckpointObjectManager
    from torchelastic.checkpoint.replicas.replication_manager import ReplicationManager

log = logging.getLogger(__name__)

DEFAULT_INITIAL_BUFFER_SIZE_BYTES = 16 * 2**30
#: Of how many saves something is remembered that were begun, and neither finished nor abandoned.
_REMEMBERED = 16


class DefaultCheckpointSaver:
    """Saves into the containers of an object manager, and has every shard replicated before a checkpoint is complete.

    One save is, in this order and on one thread of each rank: `initialize_checkpoint`, `prepare_local_plan`,
    `prepare_global_plan` (the coordinator alone), `prepare_write_data`, `write_data`, `write_metadata` (the coordinator
    alone). A storage writer calls them; derive from this class to change one.

    It may be used by several threads, one save per thread at a time. It pickles to what a process of this host needs to
    save on behalf of this one; the functions stay behind, and `torch.distributed` is asked there.

    Args:
        global_rank_getter: the rank, for messages; the replication manager is asked if it is left out.
        local_rank_getter: accepted for code written for ML Flashpoint; not needed.
        global_barrier_func: called by `finalize_checkpoint` when other code than DCP calls that.
        ckpt_obj_manager: opens the containers.
        replication_manager: sends shards to other hosts; None: this host is the only one.
        initial_buffer_size_bytes: accepted for code written for ML Flashpoint: memory is taken as it is needed, no more
            at the beginning and no limit to it.
        use_optimized_save: accepted for code written for ML Flashpoint; there is one format.

    Attributes:
        skipped: counts the saves that were left out.

    Raises:
        TypeError: there is no object manager.
    """

    def __init__(
        self,
        global_rank_getter: Callable[[], int] | None = None,
        local_rank_getter: Callable[[], int] | None = None,
        global_barrier_func: Callable[[], Any] | None = None,
        ckpt_obj_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        initial_buffer_size_bytes: int = DEFAULT_INITIAL_BUFFER_SIZE_BYTES,
        use_optimized_save: bool = True,
    ) -> None:
        del local_rank_getter, use_optimized_save
        if ckpt_obj_manager is None:
            raise TypeError("DefaultCheckpointSaver needs ckpt_obj_manager, a CheckpointObjectManager")
        if initial_buffer_size_bytes < 0:
            raise ValueError(f"initial_buffer_size_bytes is {initial_buffer_size_bytes}: it cannot be negative")
        self._manager, self._replication = ckpt_obj_manager, replication_manager
        self._rank_getter, self._barrier = global_rank_getter, global_barrier_func
        self._allow_pickles = False
        self._needs_replicas = True
        self._threads = DEFAULT_THREADS
        self._identity = secrets.token_hex(8)
        self.skipped = SkippedSaves()
        self._last_staged: Callable[[], StagedState | None] = lambda: None
        self._current = threading.local()
        self._written_on: weakref.WeakKeyDictionary[StagedItems, threading.Thread] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._saves: dict[SaveId, PlannedSave] = {}
        self._containers = SaverContainers(self._manager)

    def configure(
        self, *, threads: int | None = None, allow_pickles: bool | None = None, needs_replicas: bool | None = None
    ) -> None:
        """What the user of a storage writer sets.

        Args:
            threads: how many copy and compute checksums.
            allow_pickles: save objects whose pickles may run code when they are read.
            needs_replicas: whether there is no save without all replicas.
        """
        if needs_replicas is not None:
            self._needs_replicas = needs_replicas
        if threads is not None:
            self._threads = max(1, threads)
        if allow_pickles is not None:
            self._allow_pickles = allow_pickles

    # --- one save -----------------------------------------------------------------------------------------------------

    @property
    def save(self) -> PlannedSave:
        """The save of this thread. Raises: ValueError if none was begun."""
        save: PlannedSave | None = getattr(self._current, "save", None)
        if save is None:
            raise ValueError("no save was begun on this thread: give dcp.save a checkpoint_id")
        return save

    def initialize_checkpoint(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> None:
        """Begins a save on this thread; touches nothing yet.

        Raises:
            ValueError: this cannot be the container of a step.
        """
        base, step = parts_of(checkpoint_id)
        self._current.save = PlannedSave(CheckpointContainerId(checkpoint_id), step, base)
        self._current.staged = None
        self._end_saves(before_this=True)

    def _end_saves(self, *, before_this: bool) -> None:
        """Ends the saves of threads that are gone, and that before this one on this thread: their slots are needed.

        Not left to the last reference to them: torch's error of a failed save and its traceback hold each other, and
        all that was on the stack, until the garbage collector comes by.
        """
        with self._lock:
            written = list(self._written_on.items())
        for staged, thread in written:
            if not thread.is_alive() or (before_this and thread is threading.current_thread()):
                with self._lock:
                    self._written_on.pop(staged, None)
                if staged.held is not None:
                    staged.held.container.end(staged.held)

    def attach(self, name: str, content: bytes) -> None:
        """Adds a file to the checkpoint of this thread's save; see `MemoryStorageWriter.attach`."""
        self.save.extras[check_extra_name(name)] = bytes(content)

    def stage_data(
        self,
        checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None,
        state_dict: Mapping[str, Any],
        non_blocking: bool = True,
    ) -> StagedState:
        """Copies a state into a slot, in one pass; when this returns, the state may change. On any thread.

        Args:
            checkpoint_id: for which checkpoint; None: not known yet.
            state_dict: the state.
            non_blocking: accepted for code written for ML Flashpoint: all copies from a GPU are waited for once.

        Returns:
            The copy; where there is no memory for it, one that makes all ranks leave this save out.

        Raises:
            TypeError: the state holds a tensor that is not stored; names it.
        """
        del non_blocking
        self._end_saves(before_this=False)
        taken = TakenApart(state_dict)
        try:
            base = CheckpointContainerId(checkpoint_id).get_parent() if checkpoint_id is not None else None
            container = self._containers.at(base) if base is not None else self._containers.for_a_copy()
            layout = container.copy_layout.of_copy(taken.sources, taken.values, taken.value_bytes)
            held = container.take(layout)
            try:
                staged = staged_in(held, taken)
            except BaseException:
                held.release()
                raise
        except CheckpointError as error:
            return not_staged(taken, why_not(error, 0))
        container.hold(held, staged)
        return staged

    # --- planning -----------------------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Notes in this rank's plan what it knows: the newest checkpoint, and the room that there is.

        Raises:
            FencedError: the ranks of this group were replaced.
            CheckpointError: the container cannot be used.
        """
        save, copies = self.save, self._manager.copies
        rank = self._rank() if save.rank is None else save.rank
        container = self._containers.at(save.base)
        container.reclaim()
        skip_mark = skip_mark_in(item.index.fqn for item in plan.items)
        needed_bytes = tensor_bytes(plan)
        joined, known = container.epochs(self._group())
        if copies is not None and rank == 0 and not container.has_saved:
            known = max(known, copies.known_epoch(container.run_id))
        report = RankReport(
            save.about,
            rank,
            self._host(),
            max([container.generation, *(entry.name.generation for entry in container.inventory())]),
            (joined, known),
            needed_bytes,
            copied_bytes(),
            container.warm_bytes(needed_bytes),
            measure(container.root),
            replace(skip_mark[1], rank=rank) if skip_mark is not None else None,
            copies is not None and copies.is_free(),
        )
        deliver(report)
        items = plan.items if skip_mark is None else [item for item in plan.items if item.index.fqn != skip_mark[0]]
        return replace(plan, items=items, storage_data=report)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decides under which name is saved, and whether at all; on the coordinator.

        Args:
            plans: of all ranks, as the planner has made them of what `prepare_local_plan` returned.

        Raises:
            RuntimeError: a rank saves something else.
        """
        save, copies = self.save, self._manager.copies
        reports = collect_reports(save.about, plans)
        generation = self._containers.at(save.base).next_generation(max(report.newest for report in reports))
        name = SaveId(epoch_of(reports), 0, generation, save.step, secrets.token_hex(4))
        skipped = why_skipped(reports, shares_bytes(plans))
        can_copy = skipped is None and all(report.can_copy for report in reports)
        is_copied = copies is not None and can_copy and copies.is_due(save.step)
        decisions = [
            CoordinatorDecision(save.about, rank, len(plans), name, skipped, is_copied) for rank in range(len(plans))
        ]
        deliver(decisions[0])  # for a save without collectives; with them, each rank's own arrives
        self._saves[name] = save
        while len(self._saves) > _REMEMBERED:
            self._saves.pop(next(iter(self._saves)))
        return [replace(plan, storage_data=decision) for plan, decision in zip(plans, decisions, strict=True)]

    # --- writing ------------------------------------------------------------------------------------------------------

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner, *, with_checksums: bool = False) -> StagedItems:
        """Copies what a plan writes; when this returns, the state may change. See `staged_items.StagedItems`.

        What was copied by `stage_data` is not copied again where the plan writes just that.

        Args:
            plan: the final one of this rank.
            planner: of the save.
            with_checksums: compute them on the way; for who waits for them anyway.

        Raises:
            NotSavedError: the coordinator has decided that nobody saves, or there is no room on this rank.
            TypeError: something in the plan is not stored; names it.
        """
        save = self.save
        decision = save.decision = collect_decision(save.about, plan)
        if decision.skipped is not None:
            raise NotSavedError(decision.skipped)
        container = self._containers.at(save.base)
        container.join(self._group(), decision.save.epoch)
        container.begin(decision.save)
        copies = self._manager.copies if decision.is_copied else None
        if copies is not None:
            epoch = decision.save.epoch
            copies.enter(TierContext(container.run_id, epoch, 0, decision.rank, decision.world_size))
        resolved = resolve(plan, planner, allow_pickles=self._allow_pickles)
        if any(tensor.is_meta for _, tensor in resolved.tensors):
            raise NotSavedError(NotSaved("ram", "there was no memory to copy the state", decision.rank))
        shard = shard_of(decision.save, decision.rank, decision.world_size)
        staged = stage_items(resolved, shard, container, threads=self._threads, with_checksums=with_checksums)
        staged.replication, staged.needs_replicas, staged.copies = self._replication, self._needs_replicas, copies
        return staged

    def write_data(self, staged: StagedItems) -> list[WriteResult]:
        """Writes what was copied, and returns when the partners have it. On any thread.

        Raises:
            CheckpointError: it cannot be written, or has no replicas; it is removed.
        """
        staged.write()
        return staged.results

    def write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """All of it for `dcp.save`: copies, writes and replicates what a plan writes.

        Returns:
            The results; where there was no memory or no replica, one that makes `write_metadata` leave the save out.

        Raises:
            TypeError, ValueError: something in the plan is not stored.
            FencedError: these ranks were replaced.
        """
        save = self.save
        try:
            staged = self._current.staged = self.prepare_write_data(plan, planner, with_checksums=True)
            with self._lock:
                self._written_on[staged] = threading.current_thread()
            results = self.write_data(staged)
            self.skipped.publish_held(self._containers.at(save.base).root)
            return results
        except FencedError:
            raise
        except CheckpointError as error:
            decision = save.decision
            decided = decision.skipped if decision is not None else None  # by the coordinator, of whichever rank
            why = decided or why_not(error, decision.rank if decision is not None else 0)
            return [WriteResult(MetadataIndex(str(save.id)), 0, why)]

    def async_replicate_object(self, object_id: str | os.PathLike[str] | CheckpointObjectId) -> list[Future[int]]:
        """Sends a shard to the partners in the background; `write_data` has done so already.

        Returns:
            A future with how many copies there are, or the `ReplicationError`; none without a replication manager.
        """
        if self._replication is None:
            return []
        name, push = self._manager.names_of(CheckpointObjectId(object_id)), self._replication.push

        def push_shard() -> int:
            with ShardReader(Path(str(object_id))) as shard, shard.view() as content:
                return push(name, content)

        return [in_background(push_shard, "replica-push")]

    # --- the end ------------------------------------------------------------------------------------------------------

    def write_metadata(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Commit | None:
        """Makes a checkpoint complete, here and on the other hosts; on the coordinator.

        Args:
            metadata: of the planner; it gets the storage data.
            results: of all ranks.

        Returns:
            The commit; None if a newer checkpoint is complete already.

        Raises:
            NotSavedError: a rank has not saved. What this one has saved is removed.
            FencedError: these ranks were replaced; nothing is published.
            CheckpointError: the commit cannot be written.
        """
        save = self._save_of(results)
        failures = [one.storage_data for each in results for one in each if isinstance(one.storage_data, NotSaved)]
        if failures:
            if (staged := getattr(self._current, "staged", None)) is not None:
                staged.abandon()
            raise NotSavedError(failures[0])
        decision = save.decision
        if decision is None:
            raise ValueError(f"{save.id}: finish belongs to a save that was planned and written by this writer")
        records = records_of(results)
        if len(records) != decision.world_size:
            raise ValueError(
                f"{save.id} has {decision.world_size} shards, and {len(records)} of them are known to be written: "
                "gather the results of all ranks after `write`, or `adopt`"
            )
        metadata.storage_data = storage_data_of(results)
        metadata.storage_meta = StorageMeta(str(save.id), str(decision.save))
        container = self._containers.at(save.base)
        commit = Commit(decision.save, records, metadata, dict(save.extras), container.run_id, time.time())
        with container.finishing:
            container.fence.check(*decision.save.token)
            newest = container.newest()
            if newest is not None and newest > decision.save:
                log.info("%s is skipped: a checkpoint that was begun later is complete already", save.id)
                return None
            path = container.write_commit(commit)
            if self._replication is not None:  # hosts that do not take it are logged
                with ShardReader(path) as shard, shard.view() as content:
                    self._replication.spread(object_of(container.name, commit.shard), content)
            if self._manager.copies is not None and decision.is_copied:
                self._manager.copies.take(commit.shard, ShardReader(path))
                self._manager.copies.publish(commit.manifest(record_in(path, commit.shard.rank)))
            try:
                container.tidy()
            except CheckpointError as error:  # what is saved is saved
                log.warning("what %s has replaced is not removed: %s", save.id, error)
        return commit

    def finalize_checkpoint(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None = None
    ) -> list[int]:
        """Removes what newer checkpoints have replaced, as far as it is this process's. Called by others than DCP.

        Args:
            checkpoint_id: of the newest one; not given: that of this thread's save.

        Returns:
            The steps that are gone.
        """
        base = self.save.base if checkpoint_id is None else CheckpointContainerId(checkpoint_id).get_parent()
        if self._barrier is not None:
            self._barrier()
        return self._containers.at(base).tidy() if base is not None else []

    # --- who and where ------------------------------------------------------------------------------------------------

    def _save_of(self, results: Iterable[Iterable[WriteResult]]) -> PlannedSave:
        """The save that these results are of: the one on this thread, if they do not say."""
        items = (one.storage_data for each in results for one in each)
        stored = next((item for item in items if isinstance(item, StoredItem)), None)
        save = self._saves.pop(ShardId.parse(stored.file).name, None) if stored is not None else None
        return save if save is not None else self.save

    def gather(self, call: str, value: Any) -> Sequence[Any]:
        """What all ranks say, by rank; see `ReplicationManager.gather`. Without one, what this process says."""
        return [value] if self._replication is None else self._replication.all_gather(call, value)

    def _rank(self) -> int:
        if self._rank_getter is not None:
            return self._rank_getter()
        if self._replication is not None:
            return self._replication.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _group(self) -> str:
        """Names the ranks that save together, since they have met."""
        return "" if self._replication is None else self._replication.group

    def _host(self) -> str:
        return platform.node() if self._replication is None else self._replication.host_of(self._replication.rank)

    # --- another process ----------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: getattr(self, name) for name in ("_threads", "_allow_pickles", "_needs_replicas")}
        return _elsewhere, (type(self), self._identity, self._manager, self._replication, options)


_lock = threading.Lock()
_savers: dict[str, DefaultCheckpointSaver] = {}


def _elsewhere(
    kind: type[DefaultCheckpointSaver],
    identity: str,
    manager: CheckpointObjectManager,
    replication: ReplicationManager | None,
    options: dict[str, Any],
) -> DefaultCheckpointSaver:
    """A saver in the process that it was sent to: the same one each time, so that its slots are warm."""
    with _lock:
        saver = _savers.get(identity)
        if saver is None:
            saver = _savers[identity] = kind(ckpt_obj_manager=manager, replication_manager=replication)
        saver._identity, saver._replication = identity, replication
        vars(saver).update(options)
        return saver
