"""Waiting for a condition, not for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], timeout_s: float = 60.0, what: str = "it is so") -> T:
    """Wait until something is true; returns it. Fails the test after `timeout_s`, with `what` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value
