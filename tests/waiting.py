"""Waiting for a condition, not for seconds; and the conditions that a process has ended, or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None],
    timeout_s: float = 60.0,
    what: str = "it is so",
    detail: Callable[[], object] = str,
    every_s: float = 0.01,
) -> T:
    """Wait until something is true, which is asked for every so often; returns it.

    Fails the test after `timeout_s`, with `what` was waited for and the `detail` that can be told then.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what} {detail()}"
        time.sleep(every_s)
    return value


async def until(
    condition: Callable[[], T | None],
    timeout_s: float = 60.0,
    what: str = "it is so",
    detail: Callable[[], object] = str,
) -> T:
    """The same on an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what} {detail()}"
        await asyncio.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended; it may wait as a zombie for its parent."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def pause(pids: Iterable[int]) -> float:
    """SIGSTOP these processes; returns the time at which the last of their threads stands still.

    Until then each may still answer.
    """
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(map(stands_still, pids)), 20, f"{pids} are stopped")
    return time.monotonic()


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped; a process that has ended does not stand still."""
    try:
        threads = [status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")]
    except (FileNotFoundError, ProcessLookupError):  # one has ended since it was listed, so it was not stopped
        return False
    return bool(threads) and all("T (stopped)" in thread for thread in threads)
