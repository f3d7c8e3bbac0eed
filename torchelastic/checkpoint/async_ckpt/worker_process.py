"""Worker processes, seen from the trainer: start them, send them requests, hear how those ended, or how a worker died.

A `ProcessPoolExecutor` does not do: it cannot end a worker that hangs, and an interpreter that ends waits for it.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass
from multiprocessing import connection as connections
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from torchelastic.checkpoint.async_ckpt.agreement import own_rank
from torchelastic.checkpoint.async_ckpt.errors import describe, failed_call
from torchelastic.checkpoint.async_ckpt.executors import (
    DaemonExecutor,
    check_priorities,
    failure_of,
    settle,
    timed_stage,
)
from torchelastic.checkpoint.async_ckpt.shipping import MemoryPool, Parcel, pack
from torchelastic.checkpoint.async_ckpt.worker_main import work

if TYPE_CHECKING:
    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)

#: The kernel may take its time to tear down a large process, or one in uninterruptible I/O; that long we wait for it.
_DEATH_S = 5.0
#: A forgotten queue, or an interpreter that ends, waits no longer than this for a worker to heed SIGTERM.
UNTIDY_END_S = 2.0
#: A worker imports torch and the main module before it is ready; whoever waits for longer is told what it may hang in.
_READY_S = 30.0
#: A descendant of the worker may keep its pipes open; its end is looked for this often all the same.
_LIVENESS_S = 1.0
_HINT = ': see what it has printed (scripts need an `if __name__ == "__main__":`)'


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker process is started and ended.

    Attributes:
        is_daemon: of `multiprocessing.Process`: it may have no child processes of its own.
        cpu_priority: its nice value, -20 to 19.
        io_priority: its ionice class (Linux): 1 real-time, 2 best effort, 3 idle; None leaves it as it is.
        sigterm_timeout_s: from SIGTERM to SIGKILL, in seconds.
    """

    is_daemon: bool = True
    cpu_priority: int = 10
    io_priority: int | None = None
    sigterm_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_priorities(self.cpu_priority, self.io_priority)
        if self.sigterm_timeout_s < 0:
            raise ValueError(f"sigterm_timeout is {self.sigterm_timeout_s}: give seconds, 0 for SIGKILL at once")


class WorkerProcess:
    """One worker process, started (by spawn, never by fork) when this is made; it is ready some seconds later.

    A thread gives it one request after the other. It is ended when the interpreter ends, at the latest.

    Args:
        settings: how it is started and ended.
        once: it ends after the first call, which is done only if its exit code is 0.

    Attributes:
        settings: as given.
        process: as `multiprocessing` has it.
    """

    def __init__(self, settings: WorkerSettings, *, once: bool = False) -> None:
        self.settings = settings
        self._once = once
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), settings.cpu_priority, settings.io_priority)
        self.process = context.Process(target=work, args=arguments, name="async-checkpoint", daemon=settings.is_daemon)
        self.process.start()
        theirs.close()
        self._was_ready = False
        self._told_s = time.monotonic() + _READY_S
        # of two threads that ask at once how a process ended, one is not told; reentrant, for `__del__` of a caller
        self._lock = threading.RLock()
        self._thread = DaemonExecutor("async-checkpoint-worker")
        # run when the interpreter ends, before multiprocessing waits for its children
        self._at_exit = util.Finalize(None, end_all, args=([self], UNTIDY_END_S), exitpriority=10)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exit_code() is None

    def submit(self, parcel: Parcel) -> tuple[Future[None], Future[float]]:
        """Have it do this after what it was given before. Does not wait.

        Returns:
            Done when the `preload_fn` is through; and how many seconds it took, once it has ended. Its death is a
            `BrokenExecutor`.
        """
        staged: Future[None] = Future()
        ended = self._thread.submit(self._have_done, [parcel], staged)
        if self._once:
            self.finish()
        return staged, ended

    def finish(self) -> None:
        """Have it end after what it was given; nothing may be given to it afterwards."""
        self._thread.submit(self._see_off)
        self._thread.shutdown()

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Its exit code, negative for a signal; None if it still runs after `timeout_s`. From any thread."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                code = self.process.exitcode
            left_s = deadline_s - time.monotonic()
            if code is not None or left_s <= 0:
                return code
            connections.wait([self.process.sentinel], min(left_s, _LIVENESS_S))

    def _see_off(self) -> int:
        """Its exit code, after what it was given."""
        try:
            self._connection.send(None)
        except OSError as error:
            log.debug("the checkpoint worker %d takes no more requests: %s", self.process.pid, error)
        code = self.exit_code(math.inf) or 0
        self._at_exit.cancel()
        return code

    def _have_done(self, parcels: list[Parcel], staged: Future[None]) -> float:
        """Takes the only parcel out of the list, so that whoever uses its memory last is the worker, and frees it."""
        try:
            parcels.pop().send(self._connection)
        except OSError:
            raise self._death() from None
        while (answer := self._listen()) is not None:
            kind, content = answer
            if kind == "staged":
                settle(staged, None)
            elif kind == "failed":
                raise content
            else:
                if self._once and (code := self._see_off()):
                    raise BrokenExecutor(f"its worker process {self.process.pid} ended with exit code {code}")
                return float(content)
        raise self._death()

    def _listen(self) -> tuple[str, Any] | None:
        """What it says next; None: it is dead."""
        while True:
            is_dead = not self.is_alive  # asked first: it may tell and end in between
            try:
                if self._connection.poll(0.0 if is_dead else _LIVENESS_S):
                    answer: tuple[str, Any] = self._connection.recv()
                    if answer[0] != "ready":
                        return answer
                    self._was_ready = True
                elif is_dead:
                    return None
                elif not self._was_ready and time.monotonic() >= self._told_s:
                    self._told_s = math.inf
                    log.warning(
                        "the checkpoint worker %d is not ready after %.0f s%s", self.process.pid, _READY_S, _HINT
                    )
            except (EOFError, OSError):
                self.exit_code(math.inf)  # it has ended, or is about to
                return None

    def _death(self) -> BrokenExecutor:
        """How it died, as the failure of a call that it was at or had yet to do."""
        self._listen()  # whether it was ready
        code = self.exit_code(math.inf) or 0
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "" if self._was_ready else f", before it was ready{_HINT}"
        return BrokenExecutor(f"the worker process {self.process.pid} {ending} before the call was done{hint}")


def end_all(workers: Sequence[WorkerProcess], sigterm_timeout_s: float | None = None) -> None:
    """End workers now: SIGTERM, and SIGKILL after so long (None: the longest of their settings). From any thread."""
    if sigterm_timeout_s is None:
        sigterm_timeout_s = max((worker.settings.sigterm_timeout_s for worker in workers), default=0.0)
    for worker in workers:
        worker.finish()  # for its thread to end
        worker.process.terminate()
    deadline_s = time.monotonic() + sigterm_timeout_s
    for worker in workers:
        if worker.exit_code(max(0.0, deadline_s - time.monotonic())) is None:
            log.warning("the checkpoint worker %d did not heed SIGTERM in time; killing it", worker.process.pid)
            worker.process.kill()
            worker.exit_code(_DEATH_S)


class ProcessWorkers:
    """Processes to which requests are copied and sent; when a request is scheduled, its tensors have been copied.

    One process does the calls one after the other; it is spawned at the first call (or by `warm_up`). If it dies, all
    calls that it was at or had yet to do have failed, and the next call starts another one. See `Workers`.

    Args:
        settings: of the processes.
        once: spawn a process for each call instead, which begins with the import of torch and of the main module. Calls
            run beside each other, and one is done only if its process has ended with exit code 0.
        reuse_memory: keep the shared memory of one call for the next one.
    """

    def __init__(self, settings: WorkerSettings, *, once: bool, reuse_memory: bool) -> None:
        self._settings = settings
        self._once = once
        self._pool = MemoryPool(reuse_memory)
        self._current: WorkerProcess | None = None  # always None with `once`
        self._busy: dict[int, tuple[WorkerProcess, Future[float]]] = {}

    def start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:
        """See `Workers`."""
        call_idx = request.call_idx
        with timed_stage("copy", call_idx):
            parcel = pack(request, self._pool)
        worker = WorkerProcess(self._settings, once=True) if self._once else self._persistent()
        staged, ended = worker.submit(parcel)
        self._busy = {call: one for call, one in self._busy.items() if not one[1].done()}
        self._busy[call_idx] = worker, ended
        if self._pool.reuse and parcel.memory is not None:
            memory, give_back = parcel.memory, self._pool.give_back  # not these workers, which may be forgotten
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

    def give_up(self, call_idx: int) -> None:
        """See `Workers`."""
        if call_idx in self._busy:
            end_all([self._busy.pop(call_idx)[0]])

    def end(self, abort: bool) -> None:
        """See `Workers`."""
        current, workers = self._current, self._all()
        self._current = None
        self._busy.clear()
        if current is not None and not abort:
            current.finish()
            current.exit_code(self._settings.sigterm_timeout_s)
        if current is not None or abort:  # else each ends after its call
            end_all(workers)

    def _persistent(self) -> WorkerProcess:
        if self._current is not None and not self._current.is_alive:
            self._current.finish()
            self._current = None
        if self._current is None:
            self._current = _take_spare(self._settings) or WorkerProcess(self._settings)
        return self._current

    def _all(self) -> list[WorkerProcess]:
        current = [] if self._current is None else [self._current]
        return list({*(worker for worker, _ in self._busy.values()), *current})

    def __del__(self) -> None:
        # when the interpreter ends, workers were ended before, and their threads may have stopped with a lock held
        if hasattr(self, "_busy") and not sys.is_finalizing():
            end_all(self._all(), UNTIDY_END_S)


#: The process that was started ahead of the first call, for whoever needs one first.
_spares: list[WorkerProcess] = []
_lock = threading.Lock()


def warm_up(settings: WorkerSettings) -> int:
    """Start a worker process ahead of time, unless one waits already; returns its process id. From any thread."""
    spare = _take_spare(settings) or WorkerProcess(settings)
    with _lock:
        others, _spares[:] = list(_spares), [spare]
    end_all(others)  # they were started otherwise
    return spare.process.pid or 0


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
