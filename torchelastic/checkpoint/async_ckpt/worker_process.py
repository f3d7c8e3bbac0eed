"""The trainer's end of a worker process: start it, send it requests, hear how they ended, or how it died."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection as connections
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from torchelastic.checkpoint.async_ckpt.messages import Message, outcome_of, send_parcel, send_stop
from torchelastic.checkpoint.async_ckpt.outcome import Outcome
from torchelastic.checkpoint.async_ckpt.priority import check_priorities
from torchelastic.checkpoint.async_ckpt.shipping import Parcel
from torchelastic.checkpoint.async_ckpt.worker_main import work

log = logging.getLogger(__name__)

#: The kernel may take its time to tear down a large process, or one in uninterruptible I/O; that long we wait for it.
_DEATH_S = 5.0
#: A forgotten queue, or an interpreter that ends, waits no longer than this for a worker to heed SIGTERM.
_UNTIDY_END_S = 2.0
#: A descendant of the worker may keep its pipes open; its end is looked for this often all the same.
_LIVENESS_S = 1.0

_Outbox = queue.SimpleQueue[Parcel | None]


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

    Used by one thread at a time, except for `end_all`. It is ended when it is forgotten, or when the interpreter ends.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), settings.cpu_priority, settings.io_priority)
        self._process = context.Process(target=work, args=arguments, name="async-checkpoint", daemon=settings.is_daemon)
        self._process.start()
        theirs.close()
        self._outbox: _Outbox = queue.SimpleQueue()
        self._was_ready = False
        self._is_deaf = False
        self._staged: set[int] = set()
        self._ended: dict[int, Outcome] = {}
        box = (self._outbox, self._connection, self.pid)
        threading.Thread(target=_feed, args=box, name="async-checkpoint-outbox", daemon=True).start()
        # also run when the interpreter ends, before multiprocessing waits for its children
        util.Finalize(self, _abandon, args=(self._process, self._outbox), exitpriority=10)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def submit(self, parcel: Parcel) -> None:
        """Have it do this after what it was sent before. Does not wait; whether it arrives is seen by its outcome."""
        self._outbox.put(parcel)

    def finish(self) -> None:
        """Have it end after what it was sent."""
        self._outbox.put(None)

    def wait_for_end(self, call_idx: int, timeout_s: float) -> Outcome | None:
        """How the call ended; None if it has not within `timeout_s`. That the process has died is an end too."""
        self._wait_for(call_idx, self._ended, timeout_s)
        is_dead = not self.is_alive
        self._read()  # it may have told, and ended, since it was listened to
        return self._ended.get(call_idx) or (self.death() if is_dead else None)

    def forget(self, call_idx: int) -> None:
        """Nobody asks for this call's end any more."""
        self._ended.pop(call_idx, None)

    def wait_until_staged(self, call_idx: int, timeout_s: float) -> Outcome | None:
        """None once the call's `preload_fn` is through; else how the call ended, or that it takes too long."""
        self._wait_for(call_idx, self._staged, timeout_s)
        outcome = self.wait_for_end(call_idx, 0.0)
        if call_idx in self._staged:
            self._staged.remove(call_idx)
            return None  # what came after it is for the next poll to find
        return outcome or Outcome(f"its preload_fn was not through within {timeout_s:g} s")

    def wait_for_exit(self, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it still runs after `timeout_s`."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def death(self) -> Outcome | None:
        """How it died, as the outcome of all calls that it was at or had yet to do; None if it runs."""
        if self.is_alive:
            return None
        code = self._process.exitcode
        ending = "has ended" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        hint = (
            ""
            if self._was_ready
            else ', before it was ready: see what it has printed (scripts need an `if __name__ == "__main__":`)'
        )
        return Outcome(f"the worker process {self.pid} {ending} before the call was done{hint}")

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.kill()

    def _wait_for(self, call_idx: int, place: Iterable[int], timeout_s: float) -> None:
        """Read what it says until the call is in `place` or has ended, it is dead, or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            was_alive = self.is_alive
            self._read()
            left_s = deadline_s - time.monotonic()
            if call_idx in place or call_idx in self._ended or not was_alive or left_s <= 0:
                return
            sources: list[Connection | int] = [self._process.sentinel]
            if not self._is_deaf:
                sources.append(self._connection)
            connections.wait(sources, min(left_s, _LIVENESS_S))

    def _read(self) -> None:
        try:
            while not self._is_deaf and self._connection.poll(0):
                self._take(pickle.loads(self._connection.recv_bytes()))  # noqa: S301 - from our own worker
        except (EOFError, OSError):
            self._is_deaf = True  # it has ended, or is about to

    def _take(self, message: Message) -> None:
        if message.kind == "ready":
            self._was_ready = True
        elif message.kind == "staged":
            self._staged.add(message.call_idx)
        else:
            self._ended[message.call_idx] = outcome_of(message)


def _feed(outbox: _Outbox, connection: Connection, pid: int) -> None:
    """Send what is in the box; a thread of its own, because a worker that hangs does not read."""
    try:
        while (parcel := outbox.get()) is not None:
            send_parcel(connection, parcel, pid)
            del parcel  # its memory
        send_stop(connection)
    except OSError as error:
        log.debug("the checkpoint worker %d takes no more requests: %s", pid, error)


def end_all(workers: Sequence[WorkerProcess]) -> None:
    """End workers now: SIGTERM, and SIGKILL after the longest of their `sigterm_timeout_s`. From any thread."""
    for worker in workers:
        worker.terminate()
    deadline_s = time.monotonic() + max((worker.settings.sigterm_timeout_s for worker in workers), default=0.0)
    for worker in workers:
        if worker.wait_for_exit(max(0.0, deadline_s - time.monotonic())) is None:
            log.warning("the checkpoint worker %d did not heed SIGTERM in time; killing it", worker.pid)
            worker.kill()
            worker.wait_for_exit(_DEATH_S)


def _abandon(process: SpawnProcess, outbox: _Outbox) -> None:
    outbox.put(None)  # for its thread to end
    if process.is_alive():
        process.terminate()
        process.join(_UNTIDY_END_S)
        if process.is_alive():
            process.kill()
            process.join(_DEATH_S)
