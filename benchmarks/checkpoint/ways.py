"""The ways to save that are compared; each saves the same bytes into a folder on tmpfs and loads them again.

`save` returns when training may go on; `wait` when the checkpoint is durable there; `load` returns the tensors.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from benchmarks.checkpoint.payload import Payload
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly


class Way(ABC):
    """One way to save.

    Args:
        folder: an empty folder of its own.
        payload: what is saved.
    """

    #: Whether `save` returns before the checkpoint is durable.
    is_async = False

    def __init__(self, folder: Path, payload: Payload) -> None:
        self.folder = folder
        self.payload = payload
        self.number = 0

    @abstractmethod
    def save(self) -> None:
        """Saves; returns when training may go on."""

    def wait(self) -> None:  # noqa: B027 - a synchronous way has nothing to wait for
        """Returns when the checkpoint is durable."""

    @abstractmethod
    def load(self) -> dict[str, torch.Tensor]:
        """Reads the newest checkpoint."""

    def close(self) -> None:
        """Ends what it started, and gives its room back."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def next_path(self) -> Path:
        """A new name, after the checkpoint before the last was removed: two are kept, as ours does."""
        self.number += 1
        for old in (self.folder / str(self.number - 2), self.folder / f"{self.number - 2}.pt"):
            if old.is_dir():
                shutil.rmtree(old)
            old.unlink(missing_ok=True)
        return self.folder / str(self.number)


class OursSync(Way):
    """LocalCheckpointManager, with checksums."""

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(folder, payload)
        self.manager = LocalCheckpointManager(folder)

    def save(self) -> None:
        self.number += 1
        self.manager.save(BasicTensorAwareStateDict(self.payload.tensors), self.number, is_async=False)

    def load(self) -> dict[str, torch.Tensor]:
        assert self.manager.find_latest() == self.number
        loaded, _ = self.manager.load()
        assert isinstance(loaded, BasicTensorAwareStateDict)
        return dict(loaded.state_dict)


class OursAsync(OursSync):
    """The same in the background, on a thread."""

    is_async = True

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(folder, payload)
        self.queue = AsyncCallsQueue(worker="thread")

    def save(self) -> None:
        self.number += 1
        request = self.manager.save(BasicTensorAwareStateDict(self.payload.tensors), self.number, is_async=True)
        assert request is not None
        self.queue.schedule_async_request(request)

    def wait(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self.queue.close()
        super().close()


class TorchSave(Way):
    """torch.save to a file and torch.load."""

    def save(self) -> None:
        torch.save(self.payload.tensors, self.next_path().with_suffix(".pt"))

    def load(self) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / f"{self.number}.pt", weights_only=True)
        return loaded


class DcpSave(Way):
    """torch.distributed.checkpoint, one rank."""

    def save(self) -> None:
        dcp.save(self.payload.tensors, checkpoint_id=self.next_path())

    def load(self) -> dict[str, torch.Tensor]:
        target = {name: torch.empty_like(tensor) for name, tensor in self.payload.tensors.items()}
        dcp.load(target, checkpoint_id=self.folder / str(self.number))
        return target


class DcpAsync(DcpSave):
    """The same with async_save."""

    is_async = True
    _future: Future[Any] | None = None

    def save(self) -> None:
        self._future = dcp.async_save(self.payload.tensors, checkpoint_id=self.next_path())

    def wait(self) -> None:
        assert self._future is not None
        self._future.result()
