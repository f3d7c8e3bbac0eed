"""The worker processes of a DataLoader: whether they are alive, and the transfer of their batches."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from torchelastic.errors import UnfitError
from torchelastic.processes.exit_codes import describe_exit
from torchelastic.processes.lifeline import end_with
from torchelastic.processes.script_import import PUT_BELOW_MAIN
from torchelastic.torch_internals.data_workers import DataWorkers, keep_errors, with_workers, workers_behind

log = logging.getLogger(__name__)

T = TypeVar("T")

#: So many times in a row worker processes may die before the error is raised.
MAX_DEATHS = 3
#: For so long a process is at its end when its connections are gone.
_END_S = 0.5
#: The exit code of a process that a Python error has ended: of the script's import, say.
_OF_AN_ERROR = 1
#: Signals with which others end a process: the kernel for want of memory (of /dev/shm, too), a user.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGBUS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: What the transfer from a process that is gone raises.
_CUT = (ConnectionError, EOFError, FileNotFoundError)
#: A tensor of up to so many bytes goes through the pipe. Shared memory, by which torch hands tensors over, costs a
#: connection and a descriptor for each of them, whatever its size.
BY_VALUE_BYTES = 2**20


class WorkerProcesses:
    """The worker processes of one DataLoader. Use it from the training thread.

    torch raises an error in the main thread whenever a worker process has died, at whatever that thread is just then:
    in the middle of a commit, say. Here that happens in `next_of` only, and is repaired there (`surviving`).

    Args:
        whose: for the log.
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._workers: DataWorkers | None = None
        #: How multiprocessing starts them; fork is the only way that does not import the script.
        self._start_method = "fork"
        self._have_delivered = False

    def started_by(self, dataloader: DataLoader[Any]) -> Iterator[Any]:
        """What iterates over the DataLoader; the processes that it has, if any, are these from now on."""
        if dataloader.num_workers:
            self._start_method = (dataloader.multiprocessing_context or multiprocessing).get_start_method()
        with self._errors_of_deaths():
            iterator = iter(dataloader)
        workers = with_workers(iterator)
        if workers is not None:
            are_the_same = self._workers is not None and self._workers.are_of(iterator)
            self._have_delivered = self._have_delivered and are_the_same
            self._workers = workers
            workers.replace_end_event(_OwnEvent)
            workers.raise_no_errors()
        return iterator

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """What comes next. Raises: RuntimeError if a process has died, and whatever the dataset raises."""
        with self._errors_of_deaths():
            item = next(iterator)
        self._have_delivered = True
        return item

    def surviving(self, draw: Callable[[], T], begin_anew: Callable[[], None], why: Callable[[], str]) -> T:
        """What `draw` returns; where a process has died, that of another call after `begin_anew`, which ends them.

        Args:
            draw: draws a batch.
            begin_anew: ends the processes.
            why: of which part of the data they have died; empty: not known.

        Raises:
            UnfitError: they cannot be started: an error has ended one that has to import the script. Or each has died
                at one batch, and nobody from outside has killed it.
        """
        for deaths in itertools.count(1):
            try:
                return draw()
            except (RuntimeError, *_CUT) as error:
                if self._cannot_start(error):
                    raise _cannot_import(self._whose, self._start_method) from error
                is_cut = _is_cut(error)  # what it was handing over is gone, and so is it, soon
                if not self.have_died(_END_S if is_cut else 0.0):
                    raise
                if deaths == MAX_DEATHS:
                    if all(-code in _FROM_OUTSIDE for code in self.exit_codes()):
                        raise
                    how = self._deaths()
                    begin_anew()
                    raise UnfitError(
                        f"{MAX_DEATHS} data worker processes of {self._whose}, one after the other, have died at the "
                        f"same place ({how}): {why() or 'of what is not known'}; it is not tried again. With "
                        "num_workers=0 it is read in the trainer, where a debugger sees it"
                    ) from error
                log.warning("a data worker process of %s died (%s); starting new ones", self._whose, self._deaths())
                begin_anew()
        raise AssertionError

    def _cannot_start(self, error: Exception) -> bool:
        """Whether any other processes would end like these: not killed, but by an error, before they could read."""
        if self._start_method == "fork" or self._have_delivered:
            return False
        if self._workers is None:  # the server that was to fork them is gone
            return not isinstance(error, RuntimeError)
        return _have_raised(self._workers)

    def have_died(self, within_s: float = 0.0) -> bool:
        """Whether one is gone, or goes within so many seconds."""
        processes = self._workers.processes if self._workers is not None else []
        if within_s:
            gone = wait([process.sentinel for process in processes], within_s)
            for process in processes:
                process.join(within_s if process.sentinel in gone else 0.0)
        return not all(process.is_alive() for process in processes)

    def end(self) -> None:
        """Have them end, if there are any; returns at once, whatever they do. Nobody may use the iterator any more.

        Left to the garbage collector, torch waits for each of them up to ten seconds on the training thread.
        """
        workers, self._workers = self._workers, None
        self._have_delivered = False
        if workers is not None:
            threading.Thread(target=_end, args=(workers,), name="end-of-data-workers", daemon=True).start()

    @contextmanager
    def _errors_of_deaths(self) -> Iterator[None]:
        """Meanwhile torch raises an error in the main thread when a process dies."""
        ours = self._workers
        if ours is None:
            yield
            return
        try:
            ours.raise_errors()
            if self.have_died():  # before that; torch would not look until it has waited for five seconds
                raise RuntimeError(f"a data worker process of {self._whose} has died: {self._deaths()}")
            yield
        finally:
            ours.stop_raising()

    def exit_codes(self) -> Sequence[int]:
        """Of those that have ended."""
        codes = [process.exitcode for process in self._workers.processes] if self._workers is not None else []
        return [code for code in codes if code is not None]

    def _deaths(self) -> str:
        return ", ".join(map(describe_exit, self.exit_codes()))


def _is_cut(error: Exception) -> bool:
    """Whether the other end of a connection is gone; one that has ended in order has removed its socket before."""
    return isinstance(error, _CUT) and (not isinstance(error, FileNotFoundError) or error.filename is None)


def why_unguarded(error: BaseException) -> UnfitError | None:
    """What to raise in place of an error of torch's own DataLoader, where any other processes would end like these.

    Args:
        error: with its traceback; of a step.

    Returns:
        None: it is none of those.
    """
    if _is_of_fork_server(error):
        return _cannot_import("a DataLoader", "forkserver")
    workers = workers_behind(error)
    if workers is None or workers.have_delivered or not _have_raised(workers):
        return None
    method = next(map(_start_method_of, workers.processes))
    return None if method == "fork" else _cannot_import("a DataLoader", method)


def _have_raised(workers: DataWorkers) -> bool:
    return any(process.exitcode == _OF_AN_ERROR for process in workers.processes)


def _is_of_fork_server(error: BaseException) -> bool:
    """Whether the server that was to fork a process is gone: since Python 3.14 it imports the script."""
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, (ConnectionError, EOFError)) and "multiprocessing.popen_forkserver" in modules


def _start_method_of(process: BaseProcess) -> str:
    """How multiprocessing has started a process."""
    for method in ("fork", "spawn", "forkserver"):
        if isinstance(process, getattr(multiprocessing.get_context(method), "Process", ())):
            return method
    return multiprocessing.get_start_method()  # one of the default context


def _cannot_import(whose: str, start_method: str) -> UnfitError:
    return UnfitError(
        f"the data worker processes of {whose} ended before the first batch. multiprocessing starts them by "
        f"{start_method!r}, so they import the script: {PUT_BELOW_MAIN}, or give "
        'multiprocessing_context="fork"; else see what they have printed'
    )


class _OwnEvent:
    """The event by which torch ends worker processes, as the process sees it that alone sets it.

    A worker that was killed while it looked at the event keeps its lock for good: this process must not wait for it.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        setting = threading.Thread(target=self._event.set, name="end-of-data-workers", daemon=True)
        setting.start()
        setting.join(_END_S)


def _end(workers: DataWorkers) -> None:
    workers.shut_down()
    for process in workers.processes:
        process.kill()  # it was stopped
        process.join()


def begin_data_worker(of_user: Callable[[int], object] | None, worker: int) -> None:
    """The `worker_init_fn` of a DataLoader of ours, beside the user's own one."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid is not None:
        end_with(trainer.pid)  # torch's own watch does not end one that is at work on a sample
    keep_errors()
    if of_user is not None:
        of_user(worker)


def hand_over_by_value(_worker: int = 0) -> None:
    """Have this process pickle small tensors as what they hold, when it hands something over to another one."""
    ForkingPickler.register(torch.Tensor, _reduced)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    with suppress(TypeError, RuntimeError):  # what numpy has not, such as bfloat16 or a sparse tensor
        if tensor.nbytes <= BY_VALUE_BYTES and not tensor.requires_grad:
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]


def joined(parts: Sequence[Any]) -> Any:
    """Several batches that `default_collate` made, one behind the other; None for none.

    Raises:
        TypeError: batches of another kind.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        if all(isinstance(value, (str, bytes)) for value in first):
            return type(first)(value for part in parts for value in part)
        columns = [joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(f"default_collate made a {type(first).__name__}: give a collate_fn of your own")
