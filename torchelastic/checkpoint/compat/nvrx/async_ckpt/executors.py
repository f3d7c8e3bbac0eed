"""What runs the work of calls: here a thread of this process, in `worker_process.py` other processes; and how it ended.

Priorities are set by system calls and never by a command.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

import psutil

from torchelastic.metrics import publish_metric
from torchelastic.processes.dropped import when_dropped

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class Workers(Protocol):
    """Run the work of calls. Forgotten, they end what they have started, in bounded time."""

    def start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:
        """Hand the request to a worker; waits for its `preload_fn`, if it has one, but no longer than `timeout_s`.

        Returns:
            How many seconds it took, once it has ended; a worker's death is an end. It may be cancelled: then nobody
            asks any more.
        """

    def is_starting(self, call_idx: int) -> bool:
        """Whether this call waits for a worker that is not ready yet; that has a limit of its own."""

    def abort(self, call_idx: int) -> None:
        """End the work of this call, if it is not done, waiting for nothing; those behind it go to a new worker."""

    def end(self, abort: bool) -> None:
        """End all workers, in bounded time; those that have work left only if `abort`."""


class ThreadWorkers:
    """One daemon thread, started at the first call, which does the calls one after the other; see `Workers`.

    A request's arguments are passed as they are, so they must be a snapshot that nobody changes. `preload_fn` runs on
    the calling thread. A thread cannot be killed: work that was given up or aborted ends by itself, and is never
    finalised.

    Args:
        cpu_priority: nice value of the thread (Linux), -20 to 19.
    """

    def __init__(self, cpu_priority: int) -> None:
        check_priorities(cpu_priority, None)
        self._cpu_priority = cpu_priority
        self._thread: DaemonExecutor | None = None
        self._dropped: weakref.finalize[Any, Any] | None = None
        # weakly: the error of a call that has failed holds the frames of its work, and they its tensors
        self._works: weakref.WeakValueDictionary[int, Future[float]] = weakref.WeakValueDictionary()

    def start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:  # noqa: ARG002 - it waits for no other
        """See `Workers`."""
        staged = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
        if self._thread is None:
            self._thread = self._new_thread()
        work = self._works[request.call_idx] = self._thread.submit(staged.work)
        return work

    def is_starting(self, call_idx: int) -> bool:  # noqa: ARG002 - no thread needs longer than the others
        """See `Workers`."""
        return False

    def abort(self, call_idx: int) -> None:
        """See `Workers`."""
        work, thread = self._works.get(call_idx), self._thread
        if work is None or not work.cancel() or thread is None:
            return
        log.warning("a checkpoint thread is left at work on call %d, which is not finalised", call_idx)
        self._thread = self._new_thread()
        thread.hand_over_to(self._thread)

    def end(self, abort: bool) -> None:
        """See `Workers`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.shutdown(cancel_futures=abort)
        if abort and not all(work.done() for work in self._works.values()):
            log.warning("a checkpoint thread is still at work; it is not waited for, and its work is not finalised")

    def _new_thread(self) -> DaemonExecutor:
        thread = DaemonExecutor("async-checkpoint", partial(lower_priority, self._cpu_priority))
        if self._dropped is not None:
            self._dropped.detach()  # the thread before ends by itself
        self._dropped = when_dropped(self, partial(thread.shutdown, cancel_futures=True))
        return thread


class DaemonExecutor(Executor):
    """One daemon thread, which does one thing after the other. It holds no reference to who has made it.

    The threads of a `ThreadPoolExecutor` are no daemons: one that hangs would keep the interpreter from ending. A
    future may be cancelled while its work goes on: that ends unheard.

    Args:
        name: of the thread.
        initializer: called first, on the thread.
    """

    def __init__(self, name: str, initializer: Callable[[], object] = lambda: None) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._inbox, initializer), name=name, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor`."""
        future: Future[T] = Future()
        self._inbox.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Has the thread end after what it was given, or with `cancel_futures` after what it is at; waits for neither.

        Safe in a destructor.
        """
        del wait
        if cancel_futures:
            for future, _ in self._not_begun():
                future.cancel()
        self._inbox.put(None)

    def hand_over_to(self, successor: DaemonExecutor) -> None:
        """Has another one do what this one was given and has not begun, and this one end after what it is at."""
        for job in self._not_begun():
            successor._inbox.put(job)
        self._inbox.put(None)

    def _not_begun(self) -> Iterator[tuple[Future[Any], Callable[[], Any]]]:
        """Takes out what it was given."""
        with suppress(queue.Empty):
            while (job := self._inbox.get_nowait()) is not None:
                yield job


def _serve(
    inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None], initializer: Callable[[], object]
) -> None:
    initializer()
    while (job := inbox.get()) is not None:
        future, work = job
        if not future.cancelled():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread, and nobody would know of it
                settle(future, error)
            else:
                settle(future, result)
        del job, future, work  # its tensors must not outlive it while the thread waits for the next one


def settle(future: Future[Any], result: object) -> None:
    """Tells whoever waits for it, unless that was done or nobody asks any more; an exception is how it has failed."""
    with suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def failed(error: BaseException) -> Future[float]:
    """Work that has failed with this error."""
    future: Future[float] = Future()
    future.set_exception(error)
    return future


def check_priorities(cpu_priority: int, io_priority: int | None) -> None:
    """Raise ValueError unless these are a nice value (-20 to 19) and an I/O class (0 to 3, or None)."""
    if not -20 <= cpu_priority <= 19:
        raise ValueError(f"cpu_priority is {cpu_priority}: give a nice value from -20 to 19 (19 gives way most)")
    if io_priority is not None and io_priority not in range(4):
        raise ValueError(f"io_priority is {io_priority}: give an ionice class (1 real-time, 2 best effort, 3 idle)")


def lower_priority(cpu_priority: int, io_priority: int | None = None) -> None:
    """Raises the nice value of the calling thread, and of those it starts, to `cpu_priority`; never lowers it.

    Called first on the main thread of a process, that is the whole process. With `io_priority` it sets the I/O class of
    the process, too.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) < cpu_priority:  # Linux has a nice value per thread
            os.setpriority(os.PRIO_PROCESS, 0, cpu_priority)
        if io_priority is not None:
            psutil.Process().ionice(io_priority)
    except (psutil.Error, OSError, ValueError) as error:
        log.warning("could not set the priorities %s, %s of a checkpoint worker: %s", cpu_priority, io_priority, error)


def publish_stage(stage: Literal["schedule", "copy", "write", "finalize"], call_idx: int, duration_s: float) -> None:
    """Publish `checkpoint.async.<stage>.duration.ms` in group torchelastic, and log it at debug level."""
    duration_ms = duration_s * 1000.0
    publish_metric("torchelastic", f"checkpoint.async.{stage}.duration.ms", duration_ms)
    log.debug("asynchronous checkpoint call %d: %s took %.1f ms", call_idx, stage, duration_ms)


@contextmanager
def timed_stage(stage: Literal["schedule", "copy", "finalize"], call_idx: int) -> Iterator[None]:
    """Time what is inside; nothing is published if it raises."""
    start_s = time.monotonic()
    yield
    publish_stage(stage, call_idx, time.monotonic() - start_s)
