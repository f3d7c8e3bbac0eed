"""The ways to save that are compared; each saves the same bytes into a folder on tmpfs and loads them again.

`save` returns when training may go on; `wait` when the checkpoint is durable there; `tidy` removes the one before and
is never timed; `load` puts the newest checkpoint into the tensors that training goes on with.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from benchmarks.checkpoint.payload import Payload
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.format import batches
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly


def use_threads(threads: int) -> None:
    """Have torch, and with it the floor and all peers, and ours copy and compute on so many threads."""
    torch.set_num_threads(threads)
    batches.DEFAULT_THREADS = threads


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
    def tidy(self) -> None:
        """Removes the checkpoint before the newest one. Called after each `wait`."""

    @abstractmethod
    def load(self, targets: dict[str, torch.Tensor]) -> None:
        """Reads the newest checkpoint into these tensors."""

    def close(self) -> None:
        """Ends what it started, and gives its room back."""
        shutil.rmtree(self.folder, ignore_errors=True)


def copied(loaded: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    """What was read is put into the targets, for a way that cannot read into them."""
    torch._foreach_copy_(list(targets.values()), [loaded[name] for name in targets])


class Deferred:
    """Takes a manager's own removal out of its saves, so that it can be done when nothing is timed.

    Args:
        manager: ours or NVRx's, which have the method under the same name.
    """

    def __init__(self, manager: Any) -> None:
        self._remove: Callable[[Any], None] = manager._cleanup
        self._asked: list[Any] = []
        manager._cleanup = self._asked.append

    @property
    def is_asked(self) -> bool:
        """Whether something was put off."""
        return bool(self._asked)

    def do(self) -> None:
        """Do what was put off."""
        while self._asked:
            self._remove(self._asked.pop())


class OursSync(Way):
    """LocalCheckpointManager, with checksums."""

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(folder, payload)
        self.manager = self.make_manager()
        self.removal = Deferred(self.manager)

    def make_manager(self) -> LocalCheckpointManager:
        """The manager."""
        return LocalCheckpointManager(self.folder)

    def save(self) -> None:
        self.number += 1
        self.manager.save(BasicTensorAwareStateDict(self.payload.tensors), self.number, is_async=False)

    def tidy(self) -> None:
        self.removal.do()

    def load(self, targets: dict[str, torch.Tensor]) -> None:
        assert self.manager.find_latest() == self.number
        loaded, _ = self.manager.load()
        assert isinstance(loaded, BasicTensorAwareStateDict)
        copied(loaded.state_dict, targets)


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
        self.number += 1
        torch.save(self.payload.tensors, self._path(self.number))

    def tidy(self) -> None:
        self._path(self.number - 1).unlink(missing_ok=True)

    def load(self, targets: dict[str, torch.Tensor]) -> None:
        copied(torch.load(self._path(self.number), weights_only=True), targets)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.pt"


class DcpSave(Way):
    """torch.distributed.checkpoint, one rank."""

    def save(self) -> None:
        self.number += 1
        dcp.save(self.payload.tensors, storage_writer=self.writer())

    def writer(self) -> Any:
        """The one that it takes by itself, with as many threads as all others have."""
        return dcp.FileSystemWriter(self.folder / str(self.number), thread_count=torch.get_num_threads())

    def tidy(self) -> None:
        shutil.rmtree(self.folder / str(self.number - 1), ignore_errors=True)

    def load(self, targets: dict[str, torch.Tensor]) -> None:
        dcp.load(targets, checkpoint_id=self.folder / str(self.number))


class DcpAsync(DcpSave):
    """The same with async_save."""

    is_async = True
    _future: Future[Any] | None = None

    def save(self) -> None:
        self.number += 1
        self._future = dcp.async_save(self.payload.tensors, storage_writer=self.writer())

    def wait(self) -> None:
        assert self._future is not None
        self._future.result()
