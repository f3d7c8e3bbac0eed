"""What `torch.distributed.checkpoint` sees of a save into memory: a storage writer that is a stager too."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId
from torchelastic.checkpoint.compat.flashpoint.plans import NotSavedError
from torchelastic.checkpoint.compat.flashpoint.saver import DefaultCheckpointSaver
from torchelastic.checkpoint.compat.flashpoint.staged_items import StagedItems
from torchelastic.checkpoint.compat.flashpoint.staged_state import StagedState
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.torch_internals.checkpoints import forget_helper_process, helper_process

log = logging.getLogger(__name__)

_ON_FAILURE = ("skip", "raise")
_DEATH_S = 10.0
#: How often `async_save` looks whether the save before it has ended, when it says that it waits, and when it gives up.
_POLL_S, _PATIENCE_S, _LONGEST_S = 0.002, 10.0, 1800.0


class MemoryStorageWriter(AsyncStager, StorageWriter):
    """Saves into memory for `torch.distributed.checkpoint.save` and `async_save`; any planner, any number of ranks.

    When `save` returns, every shard has its replicas on other hosts, and the checkpoint is complete on all of them. Its
    values are those at the call, for `async_save` too; every save waits for the `async_save` before it, so that a saver
    has one under way at a time. All ranks name the same checkpoint, each in the container of the
    job on its own host: `CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(20))`.

    A save for which a host has no memory, or a shard no replica, is left out on all ranks: with a warning and a metric,
    and `save` returns normally. The checkpoint before it stays.

    Args:
        checkpoint_saver: does the work.
        mp_manager_future: accepted for code written for ML Flashpoint; not needed.
        thread_count: how many threads copy and compute checksums; None: up to four.
        mp_manager: accepted for code written for ML Flashpoint; not needed.
        on_failure: "skip"; or "raise": where a save is left out, `save` raises a `CheckpointException` on all ranks.
        needs_replicas: false: where a partner does not answer or has no room, the shard is saved without its replica,
            with a warning and the metric checkpoint.replication.failures, and the save is not left out.
        allow_pickles: save objects whose pickles may run code when they are read; the reader has to allow it too.

    Raises:
        TypeError: there is no saver.
        ValueError: `on_failure` is something else, or `thread_count` less than 1.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_saver: DefaultCheckpointSaver | None = None,
        mp_manager_future: object = None,
        thread_count: int | None = None,
        *,
        mp_manager: object = None,
        on_failure: str = "skip",
        needs_replicas: bool = True,
        allow_pickles: bool = False,
    ) -> None:
        super().__init__()
        del mp_manager_future, mp_manager
        if checkpoint_saver is None:
            raise TypeError("MemoryStorageWriter needs checkpoint_saver, for example a DefaultCheckpointSaver")
        if on_failure not in _ON_FAILURE:
            raise ValueError(f"on_failure is {on_failure!r}: give one of {', '.join(_ON_FAILURE)}")
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count is {thread_count}: give 1 or more, or None")
        self._saver = checkpoint_saver
        self._on_failure = on_failure
        checkpoint_saver.configure(threads=thread_count, allow_pickles=allow_pickles, needs_replicas=needs_replicas)

    @property
    def checkpoint_saver(self) -> DefaultCheckpointSaver:
        """What does the work."""
        return self._saver

    # --- called by DCP ------------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None = None) -> None:
        """Begins a save on this thread; where that is the one that trains, waits as `stage` does.

        Raises:
            ValueError: the id is missing, or not that of a step's container.
            CheckpointError: see `stage`.
        """
        if checkpoint_id is None:
            raise ValueError("MemoryStorageWriter needs to know where to: give dcp.save a checkpoint_id")
        self._saver.initialize_checkpoint(checkpoint_id)
        last = self._saver._last_staged()
        if last is not None and not last.is_written_here():
            del last
            self._wait_for_last()

    def stage(self, state_dict: Mapping[str, Any]) -> StagedState:
        """Copies a state for `async_save`, in one pass; when this returns, it may change.

        Waits for the `async_save` before: two would send their collectives in another order on each rank.

        Raises:
            TypeError: the state holds a tensor that is not stored; names it.
            CheckpointError: the one before does not end within half an hour.
        """
        self._wait_for_last()
        replace_helpers(self._saver.gather, self._saver._group())
        staged = self._saver.stage_data(None, state_dict)
        self._saver._last_staged = weakref.ref(staged)
        return staged

    def synchronize_staging(self) -> None:
        """Called by DCP after `stage`, which has copied everything when it returns."""

    def close(self) -> None:
        """Called by DCP on stagers that it has made itself; the slots stay for the next save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Tells this rank's number among those that save. All ranks."""
        del is_coordinator, args
        rank = kwargs.get("rank")
        self._saver.save.rank = rank if isinstance(rank, int) else None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds what this rank knows. All ranks. Raises: CheckpointError if the container cannot be used."""
        return self._saver.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds what is decided. The coordinator."""
        return self._saver.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copies, writes and replicates this rank's share; returns when that is done. All ranks.

        Raises:
            TypeError, ValueError: something in the plan is not stored; names it.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._saver.write_items(plan, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint complete, or leaves it out. The coordinator.

        Raises:
            NotSavedError: it is left out, and `on_failure` is "raise".
            CheckpointError: the commit cannot be written.
        """
        try:
            self._saver.write_metadata(metadata, results)
        except NotSavedError as error:
            save = self._saver.save
            self._saver.skipped.skipped(f"step {save.step} in {save.base}", error.why.reason, str(error.why))
            if self._on_failure == "raise":
                raise

    def storage_meta(self) -> StorageMeta | None:
        """Names the checkpoint."""
        return StorageMeta(str(self._saver.save.id))

    def _wait_for_last(self) -> None:
        began_s, has_told = time.monotonic(), False
        while (last := self._saver._last_staged()) is not None and not last.is_over:
            del last  # nobody else may have it any more
            waited_s = time.monotonic() - began_s
            if waited_s > _LONGEST_S:
                raise CheckpointError(
                    f"the async_save before this one has not ended within {_LONGEST_S:g} s: a rank hangs or is lost"
                )
            if waited_s > _PATIENCE_S and not has_told:
                has_told = True
                log.warning("a save has waited for %d s for the async_save before it: save less often", waited_s)
            time.sleep(_POLL_S)
        if last is not None:
            last.end()  # its error keeps it, or the garbage collector was not there yet

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be the container of a step."""
        try:
            name = CheckpointContainerId(checkpoint_id).name
        except ValueError:
            return False
        return CheckpointContainerId.parse_version_container_step(name) is not None

    # --- for frameworks with queues of their own ----------------------------------------------------------------------

    def attach(self, name: str, content: bytes) -> None:
        """Adds a file to the checkpoint: it lies beside the shards, on every host. The coordinator, after `reset`.

        Raises:
            ValueError: no file of a checkpoint can have this name, or no save was begun.
        """
        self._saver.attach(name, content)

    def stage_items(self, plan: SavePlan, planner: SavePlanner) -> StagedItems:
        """Copies what a plan writes; when this returns, the state may change. All ranks, on the training thread.

        Then its `write` anywhere, its `adopt` if that was in another process, and `finish` on the coordinator; or its
        `abandon`.

        Raises:
            NotSavedError: the save is left out on all ranks, or this one has no room.
            TypeError, ValueError: something in the plan is not stored; names it.
        """
        return self._saver.prepare_write_data(plan, planner)


#: The ranks among which torch has started the helper of this process, if it has; see `ReplicationManager.group`.
_helped_group = ""


def replace_helpers(gather: Callable[[str, Any], Sequence[Any]], group: str) -> None:
    """Has torch start new helpers on all ranks if one has died, or if they are those of another group of ranks.

    They form a group of their own, so none is of use without all others, nor where a worker was lost or has joined.
    Called by all ranks on the training thread before a save is given to the helpers. Does nothing where there are none,
    or where this torch does not tell.

    Args:
        gather: tells all ranks a value and returns what each says; collective. Called only where there are helpers,
            which torch starts on all ranks together.
        group: names the ranks that save together.
    """
    global _helped_group
    former, _helped_group = _helped_group, group
    process = helper_process()
    if process is None:
        return
    if former == group:
        alive = gather("async_save, looking for the helper processes", process.is_alive())
        if all(alive):
            return
        dead = [rank for rank, is_alive in enumerate(alive) if not is_alive]
        log.warning("the helper process of async_save has died on rank(s) %s: all ranks start another", dead)
    process.kill()
    process.join(_DEATH_S)
    forget_helper_process()
