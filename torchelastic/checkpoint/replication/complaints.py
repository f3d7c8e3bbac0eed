"""What strangers do at an open port is logged seldom: whoever reaches it could else fill the log, and its disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

#: Between two lines of one kind.
EVERY_S = 60.0


class Complaints:
    """Logs the first line of a kind at once, then one in `EVERY_S` at most, with how many were left out. Thread-safe.

    Args:
        log: where to.
        clock: seconds that only go forward.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._said_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def say(self, level: int, text: str, *arguments: object) -> None:
        """Log a line, or count it.

        Args:
            level: as in `logging`.
            text: the kind: with places for the arguments, as in `logging`.
            *arguments: for it.
        """
        with self._lock:
            now_s = self._clock()
            if now_s - self._said_s.get(text, -EVERY_S) < EVERY_S:
                self._left_out[text] = self._left_out.get(text, 0) + 1
                return
            self._said_s[text] = now_s
            left_out = self._left_out.pop(text, 0)
        more = f" (and {left_out} times since the last such line)" if left_out else ""
        self._log.log(level, text + "%s", *arguments, more)
