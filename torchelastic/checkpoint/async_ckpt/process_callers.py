"""Callers with worker processes, to which requests are copied and sent: one for all calls, or one for each."""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from torchelastic.checkpoint.async_ckpt.agreement import DEFAULT_TIMEOUT_S, own_rank
from torchelastic.checkpoint.async_ckpt.caller import AsyncCaller, timed_stage
from torchelastic.checkpoint.async_ckpt.errors import describe, failed_call
from torchelastic.checkpoint.async_ckpt.executors import failure_of
from torchelastic.checkpoint.async_ckpt.shipping import MemoryPool, pack
from torchelastic.checkpoint.async_ckpt.worker_process import UNTIDY_END_S, WorkerProcess, WorkerSettings, end_all

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest


class ProcessAsyncCaller(AsyncCaller):
    """Sends requests to worker processes. When a request is scheduled, its tensors have been copied.

    Args:
        is_daemon: a worker may have no child processes of its own (as `multiprocessing.Process` has it).
        cpu_priority: nice value of the workers, -20 to 19.
        io_priority: ionice class of the workers (Linux): 1 real-time, 2 best effort, 3 idle; None changes nothing.
        sigterm_timeout: when workers are ended, seconds from SIGTERM to SIGKILL.
        cpu_shm_mode: keep the shared memory of one call for the next one.
        process_group: see `AsyncCaller`.
        timeout_s: see `AsyncCaller`.
    """

    def __init__(
        self,
        *,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(process_group=process_group, timeout_s=timeout_s)
        self._settings = WorkerSettings(is_daemon, cpu_priority, io_priority, sigterm_timeout)
        self._pool = MemoryPool(reuse=cpu_shm_mode)
        self._current: WorkerProcess | None = None
        self._worker_of: dict[int, WorkerProcess] = {}

    @abstractmethod
    def _worker(self) -> WorkerProcess:
        """The process for the next request."""

    def _start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:
        call_idx = request.call_idx
        with timed_stage("copy", call_idx):
            parcel = pack(request, self._pool)
        worker = self._worker()
        self._worker_of = {one: its for one, its in self._worker_of.items() if self.knows(one)}
        self._worker_of[call_idx] = worker
        staged, ended = worker.submit(parcel)
        if self._pool.reuse and parcel.memory is not None:
            memory, give_back = parcel.memory, self._pool.give_back  # not this caller, which may be forgotten
            ended.add_done_callback(lambda _: give_back(memory))
        del parcel  # where memory is not used again, the worker holds it last, and has the work of freeing
        if request.preload_fn is not None:
            either: list[Future[Any]] = [staged, ended]
            wait(either, timeout_s, FIRST_COMPLETED)
            if not (staged.done() or ended.done()):
                end_all([worker])
                raise failed_call(call_idx, own_rank(), f"its preload_fn was not through within {timeout_s:g} s")
            error = None if staged.done() else failure_of(ended)
            if error is not None:
                raise failed_call(call_idx, own_rank(), describe(error)) from error
        return ended

    def _give_up(self, call_idx: int) -> None:
        worker = self._worker_of.pop(call_idx, None)
        if worker is not None:
            end_all([worker])

    def _end(self, abort: bool) -> None:
        current, workers = self._current, self._workers()
        self._current = None
        self._worker_of.clear()
        if current is not None and not abort:
            current.finish()
            current.exit_code(self._settings.sigterm_timeout_s)
        if current is not None or abort:  # else each ends after its call
            end_all(workers)

    def _workers(self) -> list[WorkerProcess]:
        current = [] if self._current is None else [self._current]
        return list({*self._worker_of.values(), *current})

    def __del__(self) -> None:
        # when the interpreter ends, workers were ended before, and their threads may have stopped with a lock held
        if hasattr(self, "_worker_of") and not sys.is_finalizing():
            end_all(self._workers(), UNTIDY_END_S)


class PersistentAsyncCaller(ProcessAsyncCaller):
    """Keeps one process, which does the calls one after the other. It is spawned at the first call (or by `warm_up`).

    If it dies, all calls that it was at or had yet to do have failed, and the next call starts another one.
    """

    def _worker(self) -> WorkerProcess:
        if self._current is not None and not self._current.is_alive:
            self._current.finish()
            self._current = None
        if self._current is None:
            self._current = _take_spare(self._settings) or WorkerProcess(self._settings)
        return self._current


class TemporalAsyncCaller(ProcessAsyncCaller):
    """Starts a process for each call, and takes the call for done only if that process ended with exit code 0.

    It is spawned, so each call begins with the import of torch and of the main module. Calls run beside each other.
    """

    def _worker(self) -> WorkerProcess:
        return WorkerProcess(self._settings, once=True)


#: The process that was started ahead of the first call, for whoever needs one first.
_spares: list[WorkerProcess] = []
_lock = threading.Lock()


def warm_up(settings: WorkerSettings) -> int:
    """Start a worker process ahead of time, unless one waits already; returns its process id. From any thread."""
    spare = _take_spare(settings) or WorkerProcess(settings)
    with _lock:
        others, _spares[:] = list(_spares), [spare]
    end_all(others)  # they were started otherwise
    return spare.pid


def end_spare() -> None:
    """End the process that was started ahead, if nobody has taken it."""
    with _lock:
        spares, _spares[:] = list(_spares), []
    end_all(spares)


def _take_spare(settings: WorkerSettings) -> WorkerProcess | None:
    with _lock:
        fit = next((one for one in _spares if one.settings == settings and one.is_alive), None)
        if fit is not None:
            _spares.remove(fit)
        return fit
