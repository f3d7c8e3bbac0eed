"""torchelastic.checkpoint.memory: with checksums when it saves and when it loads, and with a commit."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.memory_tier.contender import Contender, Place, dcp
from benchmarks.memory_tier.shared_bytes import SharedBytes
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager


class Ours(Contender):
    """As its guide sets it up; the older step goes in the commit of the newer one."""

    def __init__(self, place: Place, memory: SharedBytes) -> None:
        super().__init__(place, memory)
        self.base = CheckpointContainerId(str(place.folder / f"host{place.rank}" / "job"))
        self.objects = CheckpointObjectManager()
        self.replication = ReplicationManager()
        self.replication.initialize(self.objects, host=f"host{place.rank}")
        self.writer = MemoryStorageWriter(
            checkpoint_saver=DefaultCheckpointSaver(ckpt_obj_manager=self.objects, replication_manager=self.replication)
        )
        self.loader = DefaultCheckpointLoader(
            checkpoint_object_manager=self.objects, replication_manager=self.replication
        )

    def save(self) -> None:
        dcp.save(self.state, checkpoint_id=self._next_id(), storage_writer=self.writer)

    def begin(self, checkpointer: Any) -> Future[Any]:
        future: Future[Any] = dcp.async_save(
            self.state,
            checkpoint_id=self._next_id(),
            storage_writer=self.writer,
            async_checkpointer_type=checkpointer,
        )
        return future

    def load(self) -> None:
        self._load(self._id(self.step))

    def find_and_load(self) -> None:
        found = self.loader.get_latest_complete_checkpoint(self.base)
        if str(found) != self._id(self.step):
            raise RuntimeError(f"found {found}, saved was {self._id(self.step)}")
        self._load(str(found))

    def commit_file(self) -> Path:
        saves = sorted(Path(str(self.base)).glob(f"step-{self.step:09d}.*/manifest.json"))
        return saves[-1] if saves else Path(str(self.base)) / "manifest.json"

    def close(self) -> None:
        self.replication.shutdown()

    def _load(self, checkpoint_id: str) -> None:
        reader = MemoryStorageReader(path=checkpoint_id, checkpoint_loader=self.loader)
        dcp.load(self.target, checkpoint_id=checkpoint_id, storage_reader=reader)

    def _next_id(self) -> str:
        self.step += 1
        return self._id(self.step)

    def _id(self, step: int) -> str:
        version = CheckpointContainerId.format_version_container(step)
        return str(CheckpointContainerId.create_child(self.base, version))
