"""A thread for work in the background, how work has ended, and how threads and processes give way to training.

Priorities are set by system calls and never by a command.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


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
            with suppress(queue.Empty):
                while (job := self._inbox.get_nowait()) is not None:
                    job[0].cancel()
        self._inbox.put(None)


def _serve(
    inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None], initializer: Callable[[], object]
) -> None:
    initializer()
    while (job := inbox.get()) is not None:
        future, work = job
        if not future.cancelled():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread, and nobody would hear of it
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


def ended(work: Callable[[], T]) -> Future[T]:
    """Does it here and now; how that has ended."""
    future: Future[T] = Future()
    try:
        settle(future, work())
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        settle(future, error)
    return future


def failed(error: BaseException) -> Future[float]:
    """Work that has failed with this error."""
    future: Future[float] = Future()
    future.set_exception(error)
    return future


def failure_of(ended: Future[float]) -> BaseException | None:
    """Why work that has ended has failed; None if it is done."""
    return CancelledError("it was given up") if ended.cancelled() else ended.exception()


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
