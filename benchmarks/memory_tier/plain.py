"""torch.distributed.checkpoint as it is, into a folder on tmpfs."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.memory_tier.contender import Contender, dcp


class PlainDcp(Contender):
    """FileSystemWriter and FileSystemReader, without fsync, which tmpfs has no use for."""

    def save(self) -> None:
        dcp.save(self.state, storage_writer=self._next_writer())

    def begin(self, checkpointer: Any) -> Future[Any]:
        writer = self._next_writer()
        future: Future[Any] = dcp.async_save(self.state, storage_writer=writer, async_checkpointer_type=checkpointer)
        return future

    def load(self) -> None:
        dcp.load(self.target, storage_reader=dcp.FileSystemReader(self._path(self.step)))

    def commit_file(self) -> Path:
        return self._path(self.step) / ".metadata"

    def tidy(self) -> None:
        shutil.rmtree(self._path(self.step - 1), ignore_errors=True)

    def _next_writer(self) -> Any:
        self.step += 1
        return dcp.FileSystemWriter(self._path(self.step), sync_files=False)

    def _path(self, step: int) -> Path:
        return self.place.folder / str(step)
