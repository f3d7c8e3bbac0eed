"""A clock that moves only when a test advances it."""

from __future__ import annotations

import math
import threading


class FakeClock:
    """Stands in for `time.monotonic` (call it) and `time.sleep` (its `sleep`). Any thread may use it.

    Args:
        start_s: What it shows first, in seconds.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """The time in seconds; it never goes backwards."""
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once.

        Raises:
            ValueError: `seconds` is negative or not finite.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a monotonic clock cannot advance by {seconds!r} s: give a finite number >= 0")
        with self._lock:
            self._now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Return at once, `seconds` later by this clock. Raises as `advance`."""
        self.advance(seconds)
