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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection as connections
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from torchelastic.checkpoint.compat.nvrx.async_ckpt.call_agreement import failure_of, own_rank
from torchelastic.checkpoint.compat.nvrx.async_ckpt.executors import (
    DaemonExecutor,
    check_priorities,
    settle,
    timed_stage,
)
from torchelastic.checkpoint.compat.nvrx.async_ckpt.failed_call import describe, failed_call
from torchelastic.checkpoint.compat.nvrx.async_ckpt.shipping import MemoryPool, Parcel, pack
from torchelastic.checkpoint.compat.nvrx.async_ckpt.worker_main import work

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)

#: The kernel may take its time to tear down a large process, or one in uninterruptible I/O; that long we wait for it.
_DEATH_S = 5.0
#: A forgotten queue, or an interpreter that ends, waits no longer than this for a worker to heed SIGTERM.
UNTIDY_END_S = 2.0
#: A worker imports the main module and torch before it is ready, which takes seconds, and minutes from a slow network
#: file system: it gets so long by default, which is no part of the time limit of its first call.
START_TIMEOUT_S = 300.0
#: Whoever waits for longer is told what it may hang in.
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
        start_timeout_s: until it is ready for its first call, in seconds; then it is killed, and that call has failed.
    """

    is_daemon: bool = True
    cpu_priority: int = 10
    io_priority: int | None = None
    sigterm_timeout_s: float = 30.0
    start_timeout_s: float = field(default=START_TIMEOUT_S, compare=False)  # another one asks for no other process

    def __post_init__(self) -> None:
        check_priorities(self.cpu_priority, self.io_priority)
        if self.sigterm_timeout_s < 0:
            raise ValueError(f"sigterm_timeout is {self.sigterm_timeout_s}: give seconds, 0 for SIGKILL at once")
        if self.start_timeout_s <= 0:
            raise ValueError(f"start_timeout_s is {self.start_timeout_s}: give seconds, more than 0")


@dataclass(frozen=True)
class _Job:
    """A request on its way to a worker.

    Attributes:
        parcels: the only one, until it is taken out: to be sent, or to be given to another worker.
        staged: done when the `preload_fn` is through.
        ended: how many seconds it took, once it has ended. The worker's death is a `BrokenExecutor`.
    """

    parcels: list[Parcel]
    staged: Future[None] = field(default_factory=Future)
    ended: Future[float] = field(default_factory=Future)

    def take(self) -> Parcel | None:
        """The parcel, for the first of all threads that ask."""
        try:
            return self.parcels.pop()
        except IndexError:
            return None


class WorkerProcess:
    """One worker process, started (by spawn, never by fork) when this is made; it is ready some seconds later.

    A thread gives it one request after the other. It is ended when the interpreter ends, at the latest.

    Args:
        settings: how it is started and ended.
        once: it ends after the first call, which is done only if its exit code is 0.

    Attributes:
        settings: as given.
        process: as `multiprocessing` has it.
        after: workers that were given up; it begins nothing while they may still be at it.
        is_ready: whether it has taken, or could take, a request.
    """

    def __init__(self, settings: WorkerSettings, *, once: bool = False) -> None:
        self.settings = settings
        self.after: list[WorkerProcess] = []
        self.is_ready = False
        self._once = once
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), settings.cpu_priority, settings.io_priority)
        self.process = context.Process(target=work, args=arguments, name="async-checkpoint", daemon=settings.is_daemon)
        self.process.start()
        theirs.close()
        self._started_s = time.monotonic()
        self._told_s = self._started_s + _READY_S
        self._was_late = False
        self._kill_s = math.inf  # it is killed then, if it has not ended
        # of two threads that ask at once how a process ended, one is not told; reentrant, for `__del__` of a caller
        self._lock = threading.RLock()
        self._thread = DaemonExecutor("async-checkpoint-worker")
        # run when the interpreter ends, before multiprocessing waits for its children
        self._at_exit = util.Finalize(None, end_all, args=([self], UNTIDY_END_S), exitpriority=10)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exit_code() is None

    def submit(self, job: _Job) -> None:
        """Have it do this after what it was given before, unless the parcel was taken by then. Does not wait."""
        self._thread.submit(self._have_done, job)
        if self._once:
            self.finish()

    def finish(self) -> None:
        """Have it end after what it was given; nothing may be given to it afterwards."""
        self._thread.submit(self._see_off)
        self._thread.shutdown()

    def terminate(self, sigterm_timeout_s: float) -> None:
        """Ends it now, by SIGTERM, and by SIGKILL if it runs on for so long. Does not wait. From any thread."""
        self._kill_s = min(self._kill_s, time.monotonic() + sigterm_timeout_s)
        self.finish()  # for its thread to end, which sees to the SIGKILL
        if sigterm_timeout_s > 0:
            self.process.terminate()
        else:
            self.process.kill()

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Its exit code, negative for a signal; None if it still runs after `timeout_s`. From any thread.

        Whoever asks sees to it that it is killed when it has had its time to end.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                code = self.process.exitcode
            now_s = time.monotonic()
            if code is None and now_s >= self._kill_s:
                self._kill_s = math.inf
                log.warning("the checkpoint worker %d did not heed SIGTERM in time; killing it", self.process.pid)
                self.process.kill()
            if code is not None or now_s >= deadline_s:
                return code
            connections.wait([self.process.sentinel], min(deadline_s - now_s, self._kill_s - now_s, _LIVENESS_S))

    def _see_off(self) -> int:
        """Its exit code, after what it was given."""
        try:
            self._connection.send(None)
        except OSError as error:
            log.debug("the checkpoint worker %d takes no more requests: %s", self.process.pid, error)
        code = self.exit_code(math.inf) or 0
        self._at_exit.cancel()
        return code

    def _have_done(self, job: _Job) -> None:
        try:
            self._await_start()
            if (is_sent := self._send(job)) is not None:
                settle(job.ended, self._answered(job) if is_sent else self._death())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer has to know of it
            job.parcels.clear()
            settle(job.ended, error)

    def _await_start(self) -> None:
        """Returns when it takes requests. Raises: BrokenExecutor, as it never will."""
        while self.after:
            one = self.after.pop()
            one.exit_code(one.settings.sigterm_timeout_s + _DEATH_S)
        while not self.is_ready:
            answer = self._listen()
            if answer is None:
                raise self._death()
            self.is_ready = True  # that is what it says first

    def _send(self, job: _Job) -> bool | None:
        """Whether it could be sent; None if somebody else has taken it. Whoever uses its memory last is the worker."""
        parcel = job.take()
        if parcel is None:
            return None
        with suppress(OSError):
            parcel.send(self._connection)
            return True
        return False

    def _answered(self, job: _Job) -> float | BaseException:
        """How the request that was sent has ended."""
        while (answer := self._listen()) is not None:
            kind, content = answer
            if kind == "staged":
                settle(job.staged, None)
            elif kind == "failed":
                error: BaseException = content
                return error
            else:
                if self._once and (code := self._see_off()):
                    return BrokenExecutor(f"its worker process {self.process.pid} ended with exit code {code}")
                return float(content)
        return self._death()

    def _listen(self) -> tuple[str, Any] | None:
        """What it says next; None: it is dead."""
        while True:
            is_dead = not self.is_alive  # asked first: it may tell and end in between
            try:
                if self._connection.poll(0.0 if is_dead else _LIVENESS_S):
                    answer: tuple[str, Any] = self._connection.recv()
                    return answer
            except (EOFError, OSError):
                self.exit_code(math.inf)  # it has ended, or is about to
                return None
            if is_dead:
                return None
            if not self.is_ready:
                self._check_start(time.monotonic())

    def _check_start(self, now_s: float) -> None:
        """Tells that its start takes long, and ends it when it takes too long."""
        if now_s - self._started_s >= self.settings.start_timeout_s:
            self._was_late = True
            self.process.kill()  # it has begun nothing that it could end well
        elif now_s >= self._told_s:
            self._told_s = math.inf
            log.warning("the checkpoint worker %d is not ready after %.0f s%s", self.process.pid, _READY_S, _HINT)

    def _death(self) -> BrokenExecutor:
        """How it died, as the failure of a call that it was at or had yet to do."""
        code = self.exit_code(math.inf) or 0
        if self._was_late:
            return BrokenExecutor(
                f"the worker process {self.process.pid} was not ready within {self.settings.start_timeout_s:g} s "
                f"(start_timeout_s) and was ended{_HINT}"
            )
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "" if self.is_ready else f", before it was ready{_HINT}"
        return BrokenExecutor(f"the worker process {self.process.pid} {ending} before the call was done{hint}")


def end_all(workers: Sequence[WorkerProcess], sigterm_timeout_s: float | None = None) -> None:
    """End workers now: SIGTERM, and SIGKILL after so long (None: the longest of their settings). From any thread."""
    if sigterm_timeout_s is None:
        sigterm_timeout_s = max((worker.settings.sigterm_timeout_s for worker in workers), default=0.0)
    for worker in workers:
        worker.terminate(sigterm_timeout_s)
    deadline_s = time.monotonic() + sigterm_timeout_s + _DEATH_S
    for worker in workers:
        worker.exit_code(max(0.0, deadline_s - time.monotonic()))


class ProcessWorkers:
    """Processes to which requests are copied and sent; when a request is scheduled, its tensors have been copied.

    One process does the calls one after the other; it is spawned at the first call (or by `warm_up`). If it dies, all
    calls that it was at or had yet to do have failed, and the next call starts another one. If a call is given up, its
    process is ended, and another one does the calls behind it. See `Workers`.

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
        self._busy: dict[int, tuple[WorkerProcess, _Job]] = {}
        self._aborted: list[WorkerProcess] = []  # and not seen to have ended

    def start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:
        """See `Workers`."""
        call_idx = request.call_idx
        with timed_stage("copy", call_idx):
            parcel = pack(request, self._pool)
        job = _Job([parcel])
        if self._pool.reuse and parcel.memory is not None:
            memory, release = parcel.memory, self._pool.release  # not these workers, which may be forgotten
            job.ended.add_done_callback(lambda _: release(memory))
        del parcel  # where memory is not used again, the worker holds it last, and has the work of freeing
        self._busy = {call: one for call, one in self._busy.items() if not one[1].ended.done()}
        self._submit(call_idx, job)
        if request.preload_fn is not None:
            self._await_staging(call_idx, job, timeout_s)
        return job.ended

    def is_starting(self, call_idx: int) -> bool:
        """See `Workers`."""
        worker, job = self._busy.get(call_idx, (None, None))
        return worker is not None and job is not None and not (worker.is_ready or job.ended.done())

    def abort(self, call_idx: int) -> None:
        """See `Workers`."""
        worker, job = self._busy.pop(call_idx, (None, None))
        if worker is None or job is None or job.ended.done():
            return
        if job.take() is not None:
            job.ended.cancel()  # it was not begun
            if not self._once:
                return
        behind = {call: other for call, (by, other) in self._busy.items() if by is worker}
        # taken first: the process that is ended must not be one that has gone on to the next call
        parcels = {call: parcel for call, other in behind.items() if (parcel := other.take()) is not None}
        if not job.ended.done() or self._once:
            worker.terminate(self._settings.sigterm_timeout_s)
            self._aborted = [one for one in (*self._aborted, worker) if one.is_alive]
            self._current = None if self._current is worker else self._current
        for call, parcel in parcels.items():
            try:
                self._submit(call, replace(behind[call], parcels=[parcel]))
            except OSError as error:
                settle(behind[call].ended, error)

    def end(self, abort: bool) -> None:
        """See `Workers`."""
        current, workers, aborted = self._current, self._all(), self._aborted
        self._current, self._aborted = None, []
        self._busy.clear()
        if current is not None and not abort:
            current.finish()
            current.exit_code(self._settings.sigterm_timeout_s)
        # else each ends after its call
        end_all(workers if current is not None or abort else aborted)

    def _submit(self, call_idx: int, job: _Job) -> None:
        """Has a worker do it, a new one if there is none."""
        worker = WorkerProcess(self._settings, once=True) if self._once else self._persistent()
        self._busy[call_idx] = worker, job
        worker.submit(job)

    def _await_staging(self, call_idx: int, job: _Job, timeout_s: float) -> None:
        """Waits until the `preload_fn` is through. Raises: AsyncCheckpointError, as it failed or took too long."""
        deadline_s = time.monotonic() + timeout_s
        either: list[Future[Any]] = [job.staged, job.ended]
        while not (job.staged.done() or job.ended.done()):
            now_s = time.monotonic()
            if self.is_starting(call_idx):
                deadline_s = now_s + timeout_s
            elif now_s >= deadline_s:
                self.abort(call_idx)
                raise failed_call(call_idx, own_rank(), f"its preload_fn was not through within {timeout_s:g} s")
            wait(either, min(_LIVENESS_S, deadline_s - now_s), FIRST_COMPLETED)
        error = None if job.staged.done() else failure_of(job.ended)
        if error is not None:
            raise failed_call(call_idx, own_rank(), describe(error)) from error

    def _persistent(self) -> WorkerProcess:
        if self._current is not None and not self._current.is_alive:
            self._current.finish()
            self._current = None
        if self._current is None:
            self._current = _take_spare(self._settings) or WorkerProcess(self._settings)
            self._aborted = [one for one in self._aborted if one.is_alive]
            self._current.after = list(self._aborted)
        return self._current

    def _all(self) -> list[WorkerProcess]:
        current = [] if self._current is None else [self._current]
        return list({*(worker for worker, _ in self._busy.values()), *current, *self._aborted})

    def __del__(self) -> None:
        # when the interpreter ends, workers were ended before, and their threads may have stopped with a lock held
        if hasattr(self, "_aborted") and not sys.is_finalizing():
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
            fit.settings = settings
        return fit
