"""Checkpoints in memory for adapters: set up once, on all ranks, and closed with the run."""

from __future__ import annotations

import logging
import os
from collections import UserString
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError
from torchelastic.checkpoint.failures import cause_text
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
from torchelastic.checkpoint.store.fence import OwnedError
from torchelastic.group.rank_group import RankGroup

log = logging.getLogger(__name__)

Found = TypeVar("Found")

#: How long one save, one load or one agreement may take.
TIMEOUT_S = 600.0
#: What saving and loading raise; DCP's own is no `Exception`.
FAILURES = (CheckpointException, Exception)


AnyPath = str | os.PathLike[str] | UserString


def container_of(container: AnyPath | None) -> CheckpointContainerId:
    """The container of the job; None: that which `job_container` derives from the run id.

    Raises:
        ValueError: it is no absolute path, or it is not given and the job has no run id.
    """
    return job_container() if container is None else CheckpointContainerId(os.path.normpath(str(container)))


def takes_memory(memory_step: int | None, durable_step: int | None) -> bool:
    """Whether to go on from the newest checkpoint in memory: it is there, and no durable one is known to be newer.

    Args:
        memory_step: of the one in memory; None: there is none.
        durable_step: of the durable one; None: there is none, or its step is not known.

    >>> takes_memory(20, 20), takes_memory(20, 30), takes_memory(20, None), takes_memory(None, None)
    (True, False, True, False)
    """
    return memory_step is not None and (durable_step is None or memory_step >= durable_step)


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
        container: of the job, on this host; None: see `container_of`.
        async_save: write in the background; `save` returns when the values are copied.
        thread_count: for writing.
        timeout_s: how long to wait for one save, or for the other ranks.

    Attributes:
        container: as given, or derived.
        async_save: as given.
        ranks: of the job, which agree on what they do.

    Raises:
        ValueError: see `container_of`; or the time is not above 0.
    """

    def __init__(
        self,
        container: AnyPath | None,
        *,
        async_save: bool = True,
        thread_count: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds above 0")
        self.container = container_of(container)
        self.async_save = async_save
        self._thread_count = thread_count
        self._timeout_s = timeout_s
        self.ranks = RankGroup(None, timeout_s)
        self._open: _Open | None = None
        self._pending: Future[Any] | None = None
        self._pending_id = ""
        self._is_late = False  # whether it was waited for in vain

    def start(self) -> None:
        """Opens the tier, if it is not open; the process group must be there by now if the job has one.

        Raises:
            OwnedError: another run that is alive has the container: each save would fail.
            CheckpointError: so it is on another rank.
        """
        if self._open is None:
            self._open = _Open(self._thread_count, self._timeout_s)
            try:
                self.ranks.own_on_all("open the container", self._take_container)
            except BaseException:
                self.close()
                raise

    def _take_container(self) -> None:
        try:
            self._opened().manager.container(self.container)
        except OwnedError:
            raise
        except CheckpointError as error:  # saves may be possible later: a full /dev/shm, say
            log.warning("%s cannot be opened yet: %s", self.container, error)

    def path_of(self, step: int) -> str:
        """Where the checkpoint of one step lies."""
        name = CheckpointContainerId.format_version_container(step)
        return str(CheckpointContainerId.create_child(self.container, name))

    def save(self, checkpoint_id: str, tensors: Mapping[str, Any]) -> None:
        """Saves one checkpoint; waits for the one before it, if that is still being written.

        A save that fails is none: it is logged, the previous checkpoint stays, and the training goes on.

        Args:
            checkpoint_id: its container.
            tensors: what this rank gives, for the default planner of `torch.distributed.checkpoint`.

        Raises:
            CheckpointError: the save before is still not through after the time-out.
        """
        opened = self._opened()
        if self._is_late and self._pending is not None and not self._pending.done():
            raise CheckpointError(f"{self._pending_id} is still not written, so no other save is begun beside it")
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
        self._is_late = not wait([pending], self._timeout_s).done
        if self._is_late:
            self._pending = pending
            raise CheckpointError(
                f"{self._pending_id} is not written after {self._timeout_s:g} s: a rank hangs or is lost, or the state "
                "is large and needs a longer timeout_s"
            )
        try:
            pending.result()
        except FAILURES as error:
            _log_failure(self._pending_id, error)

    def newest(self) -> tuple[CheckpointContainerId, int] | None:
        """The newest complete checkpoint, which every host has now, and its step; None: none, or it cannot be read."""
        loader = self._opened().loader
        self.wait()
        try:
            found = self.own_on_all("find the newest", lambda: loader.get_latest_complete_checkpoint(self.container))
        except OutOfStepError:
            raise
        except CheckpointError as error:
            log.warning("checkpoints in %s cannot be used, and are skipped: %s", self.container, error)
            return None
        step = None if found is None else CheckpointContainerId.parse_version_container_step(found.name)
        return None if found is None or step is None else (found, step)

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
        loader = self._opened().loader
        self.wait()
        self.own_on_all(
            f"load {Path(checkpoint_id).name}",
            lambda: read(MemoryStorageReader(path=checkpoint_id, checkpoint_loader=loader)),
            failure=f"{checkpoint_id} cannot be loaded",
        )

    def own_on_all(self, call: str, work: Callable[[], Found], *, failure: str = "") -> Found:
        """See `RankGroup.own_on_all`; whatever fails is a CheckpointError, on all ranks. Collective.

        Args:
            call: the same on all ranks, so without paths.
            work: the part of this rank.
            failure: begins the error, in place of `call`.
        """

        def checked() -> Found:
            try:
                return work()
            except (Exception, CheckpointException) as error:  # DCP's own is no `Exception`
                raise CheckpointError(f"{failure or call}: {type(error).__name__}: {cause_text(error)}") from error

        return self.ranks.own_on_all(call, checked)

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
        self.ranks.all_gather("remove the container", True)
        manager.delete_container(self.container)  # where it lies elsewhere for this rank; gone already as a rule
        self.close()

    def end(self) -> None:
        """Closes the tier when all ranks have what they save, and their replicas; the container stays.

        Does nothing if the tier is not open.

        Raises:
            CheckpointError: the last save takes too long.
        """
        if self._open is not None:
            self._settle()
            self.close()

    def _settle(self) -> None:
        self.wait()
        self._opened().loader.wait_for_replicas(self._timeout_s)
        self.ranks.all_gather("end with all replicas", True)

    def close(self) -> None:
        """Waits for the save that is being written, and closes what is open; `start` opens it again."""
        self.wait()
        opened, self._open = self._open, None
        if opened is not None:
            self.ranks.close()
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

    def __init__(self, thread_count: int, timeout_s: float) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.manager = CheckpointObjectManager()
        self.replication = ReplicationManager()
        self.replication.initialize(self.manager, timeout_s=timeout_s)
        saver = DefaultCheckpointSaver(ckpt_obj_manager=self.manager, replication_manager=self.replication)
        self.writer = MemoryStorageWriter(checkpoint_saver=saver, thread_count=thread_count)
        self.loader = DefaultCheckpointLoader(
            checkpoint_object_manager=self.manager, replication_manager=self.replication
        )


def _log_failure(checkpoint_id: str, error: BaseException) -> None:
    log.error("the checkpoint %s was not saved, the one before it stays: %s", checkpoint_id, cause_text(error))
