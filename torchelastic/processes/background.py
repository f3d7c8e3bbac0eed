"""Calls on threads of their own: mostly daemons, so that a process that ends does not wait for a slow disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str, *, is_waited_for: bool = False) -> Future[T]:
    """Start the call on a thread of its own; an executor's threads would be joined when the process ends.

    Args:
        call: what to do; what it raises is raised where the result is asked for.
        name: of the thread.
        is_waited_for: whether the program does not end before it has.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=not is_waited_for).start()
    return future


def done_here(call: Callable[[], T]) -> Future[T]:
    """The same on the calling thread, which returns when it has ended; what it raises is raised where that is asked."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - whoever waits gets it
        future.set_exception(error)
    try:
        return future
    finally:
        del future  # the error's traceback has this frame


def side_by_side(calls: Mapping[str, Callable[[], T]], timeouts_s: Mapping[str, float]) -> dict[str, Future[T]]:
    """Run the calls at the same time, and return those that ended; the others are left behind.

    Args:
        calls: by name.
        timeouts_s: the limit of each, in seconds from now. One that ends later, while others still have time, counts.
    """
    began_s = time.monotonic()
    futures = {name: in_background(call, name) for name, call in calls.items()}
    for name in sorted(futures, key=lambda name: timeouts_s[name], reverse=True):
        wait([futures[name]], max(0.0, began_s + timeouts_s[name] - time.monotonic()))
    return {name: future for name, future in futures.items() if future.done()}
