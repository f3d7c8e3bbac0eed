"""Checkpoints in memory for adapters: set up once, on all ranks, and closed with the run."""

from __future__ import annotations

import logging
import os
from collections import UserString
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
    job_container,
)
from torchelastic.checkpoint.replication import ReplicationManager

log = logging.getLogger(__name__)

#: As the size of the first buffer in ML Flashpoint; memory is taken as it is needed.
INITIAL_BUFFER_SIZE_BYTES = 16 * 2**30
#: How long one save, one load or one agreement may take.
TIMEOUT_S = 600.0
#: What saving and loading raise; DCP's own is no `Exception`.
FAILURES = (CheckpointException, OSError, RuntimeError)


AnyPath = str | os.PathLike[str] | UserString


def container_of(container: AnyPath | None) -> CheckpointContainerId:
    """The container of the job; None: that which `job_container` derives from the run id.

    Raises:
        ValueError: it is no absolute path, or it is not given and the job has no run id.
    """
    return job_container() if container is None else CheckpointContainerId(os.path.normpath(str(container)))


def is_due(step: int, every_n_steps: int, skip_every_n_steps: int | None) -> bool:
    """Whether a checkpoint is saved to memory after this optimizer step.

    >>> [step for step in range(1, 13) if is_due(step, 2, 6)]
    [2, 4, 8, 10]
    """
    return step % every_n_steps == 0 and not (skip_every_n_steps and step % skip_every_n_steps == 0)


class StorageTier:
    """Saves named tensors in memory and loads them. Every method but `close` is called on all ranks, in one order.

    Nothing is opened before `start`. The ranks agree over a gloo group of their own, so that a save in the background
    does not get in the way of the training's collectives.

    Args:
        container: of the job, on this host.
        async_save: write in the background; `save` returns when the values are copied.
        thread_count: for writing.
        initial_buffer_size_bytes: grows when a rank needs more.
        use_optimized_save: as for `DefaultCheckpointSaver`.
        timeout_s: how long to wait for one save, or for the other ranks.
    """

    def __init__(
        self,
        container: CheckpointContainerId,
        *,
        async_save: bool = True,
        thread_count: int = 1,
        initial_buffer_size_bytes: int = INITIAL_BUFFER_SIZE_BYTES,
        use_optimized_save: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.container = container
        self.async_save = async_save
        self._thread_count = thread_count
        self._saver_options = {
            "initial_buffer_size_bytes": initial_buffer_size_bytes,
            "use_optimized_save": use_optimized_save,
        }
        self._timeout_s = timeout_s
        self._open: _Open | None = None
        self._pending: Future[Any] | None = None
        self._pending_id = ""

    def start(self) -> None:
        """Opens the tier, if it is not open; the process group must be there by now if the job has one."""
        if self._open is None:
            self._open = _Open(self._thread_count, self._saver_options, self._timeout_s)

    def save(self, checkpoint_id: str, tensors: Mapping[str, Any]) -> None:
        """Saves one checkpoint; waits for the one before it, if that is still being written.

        A save that fails is none: it is logged, the previous checkpoint stays, and the training goes on.

        Args:
            checkpoint_id: its container.
            tensors: what this rank gives, for the default planner of `torch.distributed.checkpoint`.
        """
        opened = self._opened()
        self.wait()
        options: dict[str, Any] = {
            "checkpoint_id": checkpoint_id,
            "storage_writer": opened.writer,
            "process_group": opened.group,
            "planner": DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        }
        try:
            if self.async_save:
                response: Any = async_save(dict(tensors), **options)  # in a thread
                # newer versions of torch return two futures in one object, where a stager is at work
                self._pending = getattr(response, "upload_completion", response)
                self._pending_id = checkpoint_id
            else:
                save(dict(tensors), **options)
        except FAILURES as error:
            _log_failure(checkpoint_id, error)

    def wait(self) -> None:
        """Waits for the save that is being written, if there is one.

        Raises:
            CheckpointError: it takes longer than `timeout_s`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not wait([pending], self._timeout_s).done:
            raise CheckpointError(
                f"{self._pending_id} is not written after {self._timeout_s:g} s: a rank hangs or is lost, or the state "
                "is large and needs a longer timeout_s"
            )
        try:
            pending.result()
        except FAILURES as error:
            _log_failure(self._pending_id, error)

    def newest(self) -> CheckpointContainerId | None:
        """The newest complete checkpoint, which every host has now; None if there is none, or it cannot be read."""
        opened = self._opened()
        self.wait()
        found, reason = None, None
        try:
            found = opened.loader.get_latest_complete_checkpoint(self.container)
        except FAILURES as error:
            reason = error
            log.warning("checkpoints in %s cannot be used, and are skipped: %s", self.container, error)
        return found if self.agree(reason is None) else None

    def load(self, checkpoint_id: str, is_wanted: Callable[[str], bool] = bool) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint, whole, in memory of their own.

        Args:
            checkpoint_id: its container.
            is_wanted: takes the name of a tensor.

        Raises:
            CheckpointError: it cannot be read, on this rank or on another one.
        """
        tensors: dict[str, torch.Tensor] = {}

        def read(reader: Any) -> None:
            reader.reset(checkpoint_id)
            for name, stored in reader.read_metadata().state_dict_metadata.items():
                if isinstance(stored, TensorStorageMetadata) and is_wanted(name):
                    tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)

        self._loading(checkpoint_id, read)
        self.load_into(checkpoint_id, tensors)
        return tensors

    def load_into(self, checkpoint_id: str, tensors: dict[str, torch.Tensor], *, may_be_missing: bool = False) -> None:
        """Loads into tensors by their names: plain ones, DTensors, ShardedTensors.

        Args:
            checkpoint_id: its container.
            tensors: overwritten in place.
            may_be_missing: leave those alone that are not in the checkpoint.

        Raises:
            CheckpointError: it cannot be read, on this rank or on another one; some may be overwritten.
        """
        planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=may_be_missing
        )
        group = self._opened().group

        def read(reader: Any) -> None:
            load(tensors, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner, process_group=group)

        self._loading(checkpoint_id, read)

    def _loading(self, checkpoint_id: str, read: Callable[[Any], None]) -> None:
        opened = self._opened()
        self.wait()
        reason: BaseException | None = None
        try:
            read(MemoryStorageReader(path=checkpoint_id, checkpoint_loader=opened.loader))
        except (*FAILURES, ValueError) as error:
            reason = error
        if not self.agree(reason is None):
            cause = reason or "another rank could not read it, see its log"
            raise CheckpointError(f"{checkpoint_id} cannot be loaded: {cause}") from reason

    def agree(self, is_well: bool) -> bool:
        """Whether this holds on all ranks; after the save that is being written, since both use one group.

        Raises:
            CheckpointError: that save takes too long.
        """
        group = self._opened().group
        self.wait()
        if group is None:
            return is_well
        flag = torch.tensor(int(is_well))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        return bool(flag)

    def of_rank_0(self, value: Any) -> Any:
        """The value that rank 0 gives, on all ranks. Raises: as `agree`."""
        group = self._opened().group
        self.wait()
        if group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, group=group)
        return values[0]

    def remove(self, local_rank: int) -> None:
        """Removes the container with all that is in it, on all hosts, after a barrier; closes the tier.

        Args:
            local_rank: of this rank on its machine, where ranks share the folder.

        Raises:
            CheckpointError: it cannot be removed.
        """
        manager = self._opened().manager
        self._settle()
        if local_rank == 0:
            manager.delete_container(self.container)
        self.agree(True)
        manager.delete_container(self.container)  # where it lies elsewhere for this rank; gone already as a rule
        self.close()

    def end(self) -> None:
        """Closes the tier when all ranks have what they save, and their replicas; the container stays.

        Raises:
            CheckpointError: the last save takes too long.
        """
        self._settle()
        self.close()

    def _settle(self) -> None:
        self.wait()
        self._opened().loader.wait_for_replicas(self._timeout_s)
        self.agree(True)

    def close(self) -> None:
        """Waits for the save that is being written, and closes what is open; `start` opens it again."""
        self.wait()
        opened, self._open = self._open, None
        if opened is not None:
            opened.replication.shutdown()
            opened.manager.teardown_pool()

    def _opened(self) -> _Open:
        if self._open is None:
            raise CheckpointError(
                f"the checkpoints in {self.container} are not open: the callback opens them when training starts, and "
                "what finds the checkpoint to go on from does before"
            )
        return self._open


class _Open:
    """The objects of a started tier."""

    def __init__(self, thread_count: int, saver_options: Mapping[str, Any], timeout_s: float) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.manager = CheckpointObjectManager()
        self.replication = ReplicationManager()
        self.replication.initialize(self.manager, timeout_s=timeout_s)
        saver = DefaultCheckpointSaver(
            ckpt_obj_manager=self.manager, replication_manager=self.replication, **saver_options
        )
        self.writer = MemoryStorageWriter(checkpoint_saver=saver, thread_count=thread_count)
        self.loader = DefaultCheckpointLoader(
            checkpoint_object_manager=self.manager, replication_manager=self.replication
        )


def _log_failure(checkpoint_id: str, error: BaseException) -> None:
    log.error("the checkpoint %s was not saved, the one before it stays: %s", checkpoint_id, error)
