"""Simulated time: events in order, a clock that jumps from one to the next, one source of chance."""

from __future__ import annotations

import collections
import heapq
import random
from collections.abc import Callable
from typing import Any

#: So many of the last lines of a trace are kept for the report of a failure.
TRACE_LINES = 400


class Engine:
    """Runs callbacks in the order of their times; equal seeds give equal histories.

    Args:
        seed: of all chance in the simulation.
        traced: keep the last `TRACE_LINES` lines that were given to `note`.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.events = 0
        self.chance = random.Random(seed)
        self.after_event: Callable[[], None] | None = None
        self.trace: collections.deque[str] | None = collections.deque(maxlen=TRACE_LINES) if traced else None
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Have `call(*args)` run so many seconds from now."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._count, call, args))

    def run_until(self, time_s: float, at_most: int | None = None) -> None:
        """Let everything happen up to that time, or so many events."""
        queue, last = self._queue, None if at_most is None else self.events + at_most
        while queue and queue[0][0] <= time_s:
            self.now_s, _, call, args = heapq.heappop(queue)
            self.events += 1
            call(*args)
            if self.after_event is not None:
                self.after_event()
            if last is not None and self.events >= last:
                return
        self.now_s = max(self.now_s, time_s)

    def note(self, *words: object) -> None:
        """One line of the trace; nothing where none is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now_s:10.4f} " + " ".join(map(str, words)))
