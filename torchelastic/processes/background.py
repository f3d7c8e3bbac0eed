"""Calls that may hang, on threads that nobody waits for: a process that ends does not wait for a slow disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Start the call on a daemon thread of that name; an executor's threads would be joined when the process ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return future
