"""The trainer's end of a worker process: start it, send it requests, hear how they ended, or how it died.

A `ProcessPoolExecutor` does not do: it cannot end a worker that hangs, and an interpreter that ends waits for it.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing import util

from torchelastic.checkpoint.async_ckpt.caller import settle
from torchelastic.checkpoint.async_ckpt.messages import Message, outcome_of, send_parcel, send_stop
from torchelastic.checkpoint.async_ckpt.outcome import CallOutcome
from torchelastic.checkpoint.async_ckpt.priority import check_priorities
from torchelastic.checkpoint.async_ckpt.shipping import Parcel
from torchelastic.checkpoint.async_ckpt.worker_main import work

log = logging.getLogger(__name__)

#: The kernel may take its time to tear down a large process, or one in uninterruptible I/O; that long we wait for it.
_DEATH_S = 5.0
#: A forgotten queue, or an interpreter that ends, waits no longer than this for a worker to heed SIGTERM.
UNTIDY_END_S = 2.0
#: A descendant of the worker may keep its pipes open; its end is looked for this often all the same.
_LIVENESS_S = 1.0


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


@dataclass(eq=False)
class Job:
    """A request for a worker.

    Attributes:
        parcel: the request; None once it was sent.
        staged: None once its `preload_fn` is through; else how the call ended before.
        ended: how the call ended.
    """

    parcel: Parcel | None
    staged: Future[CallOutcome | None] = field(default_factory=Future)
    ended: Future[CallOutcome] = field(default_factory=Future)


class WorkerProcess:
    """One worker process, started (by spawn, never by fork) when this is made; it is ready some seconds later.

    A thread gives it one job after the other. It is ended when the interpreter ends, at the latest.

    Args:
        settings: how it is started and ended.
        once: it ends after the first call, which is done only if its exit code is 0.
    """

    def __init__(self, settings: WorkerSettings, *, once: bool = False) -> None:
        self.settings = settings
        self._once = once
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), settings.cpu_priority, settings.io_priority)
        self._process = context.Process(target=work, args=arguments, name="async-checkpoint", daemon=settings.is_daemon)
        self._process.start()
        theirs.close()
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._was_ready = False
        # of two threads that ask at once how a process ended, one is not told; reentrant, for `__del__` of a caller
        self._lock = threading.RLock()
        threading.Thread(target=self._run, name="async-checkpoint-worker", daemon=True).start()
        # run when the interpreter ends, before multiprocessing waits for its children
        self._at_exit = util.Finalize(None, end_all, args=([self], UNTIDY_END_S), exitpriority=10)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exit_code() is None

    def submit(self, job: Job) -> None:
        """Have it do this after what it was given before. Does not wait."""
        self._inbox.put(job)

    def finish(self) -> None:
        """Have it end after what it was given; nothing may be given to it afterwards."""
        self._inbox.put(None)

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Its exit code, negative for a signal; None if it still runs after `timeout_s`. From any thread."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                code = self._process.exitcode
            left_s = deadline_s - time.monotonic()
            if code is not None or left_s <= 0:
                return code
            connections.wait([self._process.sentinel], min(left_s, _LIVENESS_S))

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.kill()

    def _run(self) -> None:
        while (job := self._inbox.get()) is not None:
            outcome = self._have_done(job)
            settle(job.staged, outcome)
            settle(job.ended, outcome)
            del job  # and its memory, while the thread waits for the next one
            if self._once:
                break
        self._send_stop()
        self.exit_code(math.inf)
        self._at_exit.cancel()

    def _have_done(self, job: Job) -> CallOutcome:
        parcel, job.parcel = job.parcel, None
        try:
            if parcel is not None:
                send_parcel(self._connection, parcel, self.pid)
        except OSError:
            return self._death()
        del parcel
        while (message := self._listen()) is not None:
            if message.kind == "ended":
                outcome = outcome_of(message)
                return outcome if outcome.has_failed or not self._once else self._ended_well(outcome)
            settle(job.staged, None)
        return self._death()

    def _listen(self) -> Message | None:
        """What it says next; None: it is dead."""
        while True:
            is_dead = not self.is_alive  # asked first: it may tell and end in between
            try:
                if self._connection.poll(0.0 if is_dead else _LIVENESS_S):
                    message: Message = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own worker
                    if message.kind != "ready":
                        return message
                    self._was_ready = True
                elif is_dead:
                    return None
            except (EOFError, OSError):
                self.exit_code(math.inf)  # it has ended, or is about to
                return None

    def _ended_well(self, outcome: CallOutcome) -> CallOutcome:
        self._send_stop()
        code = self.exit_code(math.inf)
        return CallOutcome(f"its worker process {self.pid} ended with exit code {code}") if code else outcome

    def _death(self) -> CallOutcome:
        """How it died, as the outcome of a call that it was at or had yet to do."""
        self._listen()  # whether it was ready
        code = self.exit_code(math.inf) or 0
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = (
            ""
            if self._was_ready
            else ', before it was ready: see what it has printed (scripts need an `if __name__ == "__main__":`)'
        )
        return CallOutcome(f"the worker process {self.pid} {ending} before the call was done{hint}")

    def _send_stop(self) -> None:
        try:
            send_stop(self._connection)
        except OSError as error:
            log.debug("the checkpoint worker %d takes no more requests: %s", self.pid, error)


def end_all(workers: Sequence[WorkerProcess], sigterm_timeout_s: float | None = None) -> None:
    """End workers now: SIGTERM, and SIGKILL after so long (None: the longest of their settings). From any thread."""
    if sigterm_timeout_s is None:
        sigterm_timeout_s = max((worker.settings.sigterm_timeout_s for worker in workers), default=0.0)
    for worker in workers:
        worker.finish()  # for its thread to end
        worker.terminate()
    deadline_s = time.monotonic() + sigterm_timeout_s
    for worker in workers:
        if worker.exit_code(max(0.0, deadline_s - time.monotonic())) is None:
            log.warning("the checkpoint worker %d did not heed SIGTERM in time; killing it", worker.pid)
            worker.kill()
            worker.exit_code(_DEATH_S)
