"""Who is told how long the training thread has waited for a batch. The train loop sets it; by default nobody is."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Called on the training thread with nanoseconds, right after each wait.
listener: Callable[[int], None] | None = None


def has_waited(began_ns: int) -> None:
    """Called on the training thread when a batch has come: it was waited for since then, by `time.monotonic_ns`."""
    if listener is not None:
        listener(time.monotonic_ns() - began_ns)
