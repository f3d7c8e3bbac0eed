"""ML Flashpoint 0.0.10 (Apache-2.0, PyPI) on CPU tensors, with nothing inside of it edited.

What it wants of a GPU is given from outside: the number of devices per node, which it divides by. Its plain DCP path
neither finishes a step nor removes the one before it; that is done here after each save, outside of the time taken. It
replicates without telling anybody when that is done; a subclass keeps what it would drop, so that it can be waited for.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.payload import MIB
from benchmarks.memory_tier.contender import Contender, Place, dcp
from benchmarks.memory_tier.shared_bytes import SharedBytes

ACKNOWLEDGED_IN_S = 120.0
ROOM_BYTES = 16 * MIB
BUFFERS = 2  # what its NeMo adapter makes for each writer


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"ml_flashpoint.{module}"), name)


class Flashpoint(Contender):
    """As its guide for DCP sets it up."""

    pool_config: Any = None

    def __init__(self, place: Place, memory: SharedBytes) -> None:
        super().__init__(place, memory)
        os.environ |= {"NNODES": str(place.ranks), "LOCAL_RANK": "0"}
        torch.cuda.device_count = lambda: 1
        self._id_class = _named("core.checkpoint_id_types.CheckpointContainerId")
        self.base = self._id_class(str(place.folder / "job"))
        self.objects = _named("checkpoint_object_manager.checkpoint_object_manager.CheckpointObjectManager")(
            self.make_pool_config(place)
        )
        self.replication = _keeping_futures(_named("replication.replication_manager.ReplicationManager"))()
        self.replication.initialize(self.objects)
        manager: Future[Any] = Future()
        manager.set_result(multiprocessing.get_context("spawn").Manager())
        self.saver = _named("core.checkpoint_saver.DefaultMLFlashpointCheckpointSaver")(
            global_rank_getter=dist.get_rank,
            local_rank_getter=_local_rank,
            global_barrier_func=dist.barrier,
            ckpt_obj_manager=self.objects,
            replication_manager=self.replication,
            initial_buffer_size_bytes=self._buffer_bytes(),
        )
        self.writer = _named("adapter.pytorch.memory_storage_writer.MemoryStorageWriter")(self.saver, manager)
        self.loader = _named("core.checkpoint_loader.DefaultMLFlashpointCheckpointLoader")(
            self.objects,
            self.replication,
            global_rank_getter=dist.get_rank,
            local_rank_getter=_local_rank,
            broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )

    def make_pool_config(self, place: Place) -> Any:  # noqa: ARG002 - for the one with a pool
        """Without a pool, every save makes new files."""
        return None

    def save(self) -> None:
        dcp.save(self.state, checkpoint_id=self._next_id(), storage_writer=self.writer)
        for future in self.replication.kept:
            if not future.result(ACKNOWLEDGED_IN_S).success:
                raise RuntimeError("a replica was not acknowledged")
        self.replication.kept.clear()

    def begin(self, checkpointer: Any) -> Future[Any]:
        future: Future[Any] = dcp.async_save(
            self.state,
            checkpoint_id=self._next_id(),
            storage_writer=self.writer,
            async_checkpointer_type=checkpointer,
        )
        return future

    def load(self) -> None:
        checkpoint_id = self._id(self.step)
        reader = _named("adapter.pytorch.memory_storage_reader.MemoryStorageReader")(checkpoint_id, self.loader)
        dcp.load(self.target, checkpoint_id=checkpoint_id, storage_reader=reader)

    def commit_file(self) -> Path:
        """Only the host of the coordinator has metadata."""
        folder = Path(self._id(self.step))
        return folder / ".metadata" if self.place.rank == 0 else next(folder.glob("*.distcp"), folder / "__0_0.distcp")

    def tidy(self) -> None:
        removal = self.saver.finalize_checkpoint(self._id_class(self._id(self.step)))
        if removal is not None:
            removal.wait()

    def close(self) -> None:
        self.objects.teardown_pool()
        self.replication.shutdown()

    def _buffer_bytes(self) -> int:
        return self.memory.payload.size_bytes + ROOM_BYTES

    def _next_id(self) -> str:
        self.step += 1
        return self._id(self.step)

    def _id(self, step: int) -> str:
        return str(self._id_class.create_child(self.base, self._id_class.format_version_container(step)))


class FlashpointWithPool(Flashpoint):
    """With the pool of buffers that its NeMo adapter gives it."""

    def make_pool_config(self, place: Place) -> Any:
        folder = str(place.folder / "job" / "buffer_pool")
        return _named("core.buffer_pool.BufferPoolConfig")(folder, place.rank, BUFFERS, self._buffer_bytes())


def _local_rank() -> int:
    return 0


def _keeping_futures(base: Any) -> Any:
    class Keeping(base):  # type: ignore[misc]  # imported where it is there
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Future[Any]] = []

        def async_replicate(self, buffer_io: Any) -> list[Future[Any]]:
            futures: list[Future[Any]] = super().async_replicate(buffer_io)
            self.kept += futures
            return futures

    return Keeping
