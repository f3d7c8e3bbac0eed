"""The worker processes of torch's DataLoader.

torch raises an error in the main thread whenever one has died, at whatever that thread is just then. Here that can be
confined to where it is expected.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import dataloader

from torchelastic.torch_internals.canary import check_torch, is_there, say_missing
from torchelastic.torch_internals.table import DATA_WORKERS

check_torch()


def with_workers(iterator: Iterator[Any]) -> DataWorkers | None:
    """The worker processes of an iterator over a DataLoader; None: it has none, or this torch does not tell."""
    if not _are_known():
        return None
    return DataWorkers(iterator) if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter) else None


@functools.cache
def _are_known() -> bool:
    lacking = [name for name in DATA_WORKERS if not is_there(name)]
    for name in lacking[:1]:
        say_missing(name.path)
    return not lacking


def workers_behind(error: BaseException) -> DataWorkers | None:
    """The worker processes of the DataLoader that was asked for a batch when this error came; None: of none."""
    if not _are_known():
        return None
    found, traceback = None, error.__traceback__
    while traceback is not None:
        asked = traceback.tb_frame.f_locals.get("self")
        if isinstance(asked, dataloader._MultiProcessingDataLoaderIter):
            found = DataWorkers(asked)
        traceback = traceback.tb_next
    return found


class _KeptError(ExceptionWrapper):
    """An error of a data worker process whose class the trainer cannot have, or cannot make again of a text."""

    def __init__(self, name: str, text: str, where: str) -> None:
        self.name, self.text, self.where = name, text, where

    def reraise(self) -> None:
        """Raise what torch raises for errors that it cannot make again, with the same words."""
        raise RuntimeError(f"Caught {self.name} {self.where}.\nOriginal {self.text}")


def keep_errors() -> None:
    """Have this process, a data worker, hand over each error with its text, whatever its class is like.

    A class that cannot be pickled (one that was made in a function, as botocore's) is lost on its way, and the trainer
    waits for ever; of one that has a `message` torch raises how it cannot be made.
    """
    ForkingPickler.register(ExceptionWrapper, _reduced)


def _reduced(error: Any) -> Any:
    kind = error.exc_type
    try:
        ForkingPickler.dumps(kind)
        if getattr(kind, "message", None):
            kind(message="")
    except Exception:  # noqa: BLE001 - whatever it raises, it cannot be handed over
        return _KeptError, (kind.__name__, error.exc_msg, error.where)
    return error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class DataWorkers:
    """The worker processes of one iterator.

    Args:
        iterator: torch's.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """They."""
        processes: Sequence[BaseProcess] = self._iterator._workers
        return processes

    @property
    def have_delivered(self) -> bool:
        """Whether a batch of them has come, since the present iteration over the DataLoader began."""
        return bool(self._iterator._rcvd_idx)

    def are_of(self, iterator: object) -> bool:
        """Whether they are those of this iterator; with `persistent_workers` a DataLoader gives the same one again."""
        return iterator is self._iterator

    def replace_end_event(self, replaced: Callable[[Any], Any]) -> None:
        """Have torch end them by another event, made of its own one."""
        self._iterator._workers_done_event = replaced(self._iterator._workers_done_event)

    def raise_no_errors(self) -> None:
        """Have torch raise no error in the main thread when one dies, from the start of the iterator on."""
        if self._iterator._worker_pids_set:
            self.stop_raising()
            self._iterator._worker_pids_set = False

    def raise_errors(self) -> None:
        """Have it do so."""
        torch._C._set_worker_pids(id(self._iterator), tuple(process.pid or 0 for process in self.processes))

    def stop_raising(self) -> None:
        """The opposite. Idempotent."""
        with suppress(ValueError):  # another DataLoader's process has died before this was set
            torch._C._remove_worker_pids(id(self._iterator))

    def shut_down(self) -> None:
        """Ask them to end, and after five seconds send SIGTERM."""
        self._iterator._shutdown_workers()
