"""Ranks whose checkpoints lie in the memory of their hosts, with copies in a store; by public names alone."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from tests.older_torch import async_save_in
from tests.waiting import wait_until
from torchelastic.checkpoint import CheckpointError, DurableTier, EverySteps, KeepLast
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import LazyCliqueReplicationStrategy, ReplicationManager
from torchelastic.checkpoint.store import SealedShard, ShardRecord

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly

COPIED_S = 60.0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _weights(step: int, rank: int) -> torch.Tensor:
    return torch.arange(1000 + 100 * rank, dtype=torch.float32) + 1000 * step + rank


class SlowTier(DurableTier):
    """A store to which nothing gets while `goes_on` is clear; from no process before the file `begins` is there.

    What it has it does not tell while `answers` is clear.
    """

    goes_on, answers = threading.Event(), threading.Event()
    goes_on.set()
    answers.set()
    begins: Path | None = None

    def require_own(self) -> None:
        assert self.answers.wait(COPIED_S), "the storage is silent"
        super().require_own()

    def put(self, shard: SealedShard) -> ShardRecord:
        assert self.goes_on.wait(COPIED_S)
        wait_until(lambda: self.begins is None or self.begins.exists(), COPIED_S, "the store")
        return super().put(shard)


class Checkpoints(ABC):
    """One kind on one rank, which is a host of its own.

    Args:
        root: of all hosts.
        store: its URL; None: beside the hosts.
        every: of the copies.
    """

    def __init__(self, root: Path, store: str | None = None, every: int = 1) -> None:
        self.folder = root / f"host-{_rank()}" / "job"
        self.durable = SlowTier(store or f"file://{root}/store", KeepLast(2), EverySteps(every))

    @abstractmethod
    def save(self, step: int) -> None:
        """Save a step."""

    @abstractmethod
    def save_aside(self, step: int) -> None:
        """Save a step by a process of its own."""

    @abstractmethod
    def resume(self) -> int | None:
        """The step of what is found, which has to be what was saved; None: there is nothing."""

    def meet(self) -> None:  # noqa: B027 - most do by themselves
        """The process group was formed anew."""

    @abstractmethod
    def wait(self, timeout_s: float = COPIED_S) -> bool:
        """Whether nothing is being copied, after some time."""

    @abstractmethod
    def close(self) -> None:
        """The end."""


class Local(Checkpoints):
    def __init__(self, root: Path, store: str | None = None, every: int = 1) -> None:
        super().__init__(root, store, every)
        strategy = LazyCliqueReplicationStrategy(1, 2) if dist.is_initialized() else None
        self._manager = LocalCheckpointManager(self.folder, "job", strategy, durable=self.durable, timeout_s=30.0)

    def save(self, step: int) -> None:
        self._manager.save(BasicTensorAwareStateDict({"weights": _weights(step, _rank())}), step)

    def save_aside(self, step: int) -> None:
        with AsyncCallsQueue() as queue:
            state = BasicTensorAwareStateDict({"weights": _weights(step, _rank())})
            request = self._manager.save(state, step, is_async=True)
            assert request is not None
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

    def resume(self) -> int | None:
        if self._manager.find_latest() < 0:
            return None
        state, id_ = self._manager.load(shard=_rank() % self._manager.latest_world_size)
        assert isinstance(state, BasicTensorAwareStateDict)
        assert torch.equal(state.to_tree()["weights"], _weights(id_.iteration, id_.rank))
        return id_.iteration

    def wait(self, timeout_s: float = COPIED_S) -> bool:
        return self._manager.wait_for_durable(timeout_s)

    def close(self) -> None:
        self._manager.close()


class Memory(Checkpoints):
    def __init__(self, root: Path, store: str | None = None, every: int = 1) -> None:
        super().__init__(root, store, every)
        os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = f"host-{_rank()}"
        self._objects, self._replication = CheckpointObjectManager(durable=self.durable), ReplicationManager()
        self._replication.initialize(self._objects)
        saver = DefaultCheckpointSaver(ckpt_obj_manager=self._objects, replication_manager=self._replication)
        self._writer = MemoryStorageWriter(saver, on_failure="raise")
        self._loader = DefaultCheckpointLoader(self._objects, self._replication)

    def meet(self) -> None:
        self._replication.initialize(self._objects)

    def save(self, step: int) -> None:
        state, id_ = self._state(step)
        dcp.save(state, checkpoint_id=id_, storage_writer=self._writer)

    def save_aside(self, step: int) -> None:
        state, id_ = self._state(step)
        dcp.async_save(state, checkpoint_id=id_, storage_writer=self._writer, **async_save_in("process")).result()

    def _state(self, step: int) -> tuple[dict[str, torch.Tensor], str]:
        id_ = self.folder / CheckpointContainerId.format_version_container(step)
        return {f"weights {_rank()}": _weights(step, _rank())}, str(id_)

    def resume(self) -> int | None:
        latest = self._loader.get_latest_complete_checkpoint(self.folder)
        if latest is None:
            return None
        step = CheckpointContainerId.parse_version_container_step(latest.name)
        assert step is not None
        state = {f"weights {_rank()}": torch.zeros_like(_weights(step, _rank()))}
        dcp.load(state, checkpoint_id=str(latest), storage_reader=MemoryStorageReader(checkpoint_loader=self._loader))
        assert torch.equal(state[f"weights {_rank()}"], _weights(step, _rank()))
        return step

    def wait(self, timeout_s: float = COPIED_S) -> bool:
        return self._objects.wait_for_durable(timeout_s)

    def close(self) -> None:
        self._replication.shutdown()
        self._objects.teardown_pool()


KINDS: dict[str, type[Checkpoints]] = {"local": Local, "memory": Memory}


def save(kind: str, root: Path, steps: list[int], every: int = 1) -> None:
    """Save some steps; each copy is waited for."""
    checkpoints = KINDS[kind](root, every=every)
    for step in steps:
        checkpoints.save(step)
        assert checkpoints.wait()
    checkpoints.close()


def save_on(kind: str, root: Path, steps: list[int]) -> None:
    """Save some steps while the copy of the first one is under way; then the last one."""
    checkpoints = KINDS[kind](root)
    checkpoints.durable.goes_on.clear()
    for step in steps[:-1]:
        checkpoints.save(step)
    checkpoints.durable.goes_on.set()
    assert checkpoints.wait()
    if dist.is_initialized():
        dist.barrier()
    checkpoints.save(steps[-1])
    assert checkpoints.wait()
    checkpoints.close()


def save_and_die_in_the_copy(kind: str, root: Path, steps: list[int]) -> None:
    """Save a step, and then another one: all ranks are killed when one of them has uploaded its shard."""
    checkpoints = KINDS[kind](root)
    checkpoints.save(steps[0])
    assert checkpoints.wait()
    if _rank() == 1:
        checkpoints.durable.goes_on.clear()
    checkpoints.save(steps[1])
    wait_until(lambda: list(root.glob(f"store/step-{steps[1]:09d}.*/shard-00000-*")), COPIED_S, "a shard")
    os.kill(os.getpid(), signal.SIGKILL)


def save_aside(kind: str, root: Path, step: int) -> None:
    """Save a step by a process of its own, and wait until it has a copy, which is under way for a while."""
    checkpoints = KINDS[kind](root)
    checkpoints.durable.begins = root / "the store answers"
    checkpoints.save_aside(step)
    assert not checkpoints.wait(0.0), "it is being copied"
    if dist.is_initialized():
        dist.barrier()
    checkpoints.durable.begins.touch()
    assert checkpoints.wait()
    assert _rank() or len(list(root.glob(f"store/step-{step:09d}.*/manifest.json"))) == 1
    checkpoints.close()


def resume(kind: str, root: Path, then: int | None = None) -> int | None:
    """What is found; then a step is saved, if one is given."""
    checkpoints = KINDS[kind](root)
    found = checkpoints.resume()
    if then is not None:
        checkpoints.save(then)
        assert checkpoints.wait()
    checkpoints.close()
    return found


def save_without_a_store(kind: str, root: Path, store: str) -> tuple[int | None, str]:
    """Save where nothing answers, and resume there; then without the host's folder too, and how."""
    checkpoints = KINDS[kind](root, store)
    checkpoints.save(1)
    assert checkpoints.wait()
    found = checkpoints.resume()
    checkpoints.close()
    shutil.rmtree(checkpoints.folder)
    try:
        return found, str(KINDS[kind](root, store).resume())
    except CheckpointError as error:
        return found, str(error)


def save_while_the_store_comes_back(kind: str, root: Path) -> None:
    """A job that has begun while the store could not be read saves, and once more when it can."""
    store, away = root / "store", root / "away"
    store.rename(away)
    store.write_text("no folder")
    checkpoints = KINDS[kind](root)
    checkpoints.save(6)
    assert checkpoints.wait()
    store.unlink()
    away.rename(store)
    checkpoints.save(7)
    assert checkpoints.wait()
    checkpoints.close()


def save_while_the_store_is_silent(kind: str, root: Path) -> float:
    """How long two saves of a job take that begins while the store does not answer."""
    checkpoints = KINDS[kind](root)

    def save() -> None:
        checkpoints.save(4)
        assert checkpoints.wait()
        checkpoints.save(5)

    return _seconds_without_answers(checkpoints, save)


def save_in_a_new_group(kind: str, root: Path) -> float:
    """How long a save takes that is the first one of a group, of ranks that have saved, while the store is silent."""
    checkpoints = KINDS[kind](root)
    checkpoints.save(4)
    assert checkpoints.wait()
    rank = _rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root / 'another group'}", rank=rank, world_size=2)
    checkpoints.meet()
    return _seconds_without_answers(checkpoints, lambda: checkpoints.save(5))


def _seconds_without_answers(checkpoints: Any, save: Callable[[], None]) -> float:
    checkpoints.durable.answers.clear()
    began_s = time.monotonic()
    save()
    took_s = time.monotonic() - began_s
    checkpoints.durable.answers.set()
    assert checkpoints.wait()
    checkpoints.close()
    return took_s


def save_while_replaced(kind: str, root: Path) -> int | None:
    """A job saves, another one of other hosts with the same store does, and then the first one again; what that has."""
    store = f"file://{root}/store"
    first = KINDS[kind](root, store)
    first.save(5)
    assert first.wait()
    second = KINDS[kind](root / "others", store)
    second.save(7)
    assert second.wait()
    first.save(9)
    assert first.wait()
    return first.resume()
