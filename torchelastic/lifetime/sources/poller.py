"""One daemon thread that polls all sources, each at its own interval."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Polls once, and returns the seconds until the next poll; None: never.
Poll = Callable[[], "float | None"]

#: A source that raises is polled again so much later.
_AFTER_ERROR_S = 60.0


class Poller:
    """Calls functions repeatedly, one after the other, on one daemon thread of this name. Methods: from any thread.

    The thread runs while there is something to poll. A forked child has none: it keeps what was known. `clock` is in
    real monotonic seconds, as it waits by them.
    """

    def __init__(self, name: str = "torchelastic-deadlines", clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._due_s: dict[Poll, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, poll: Poll, after_s: float = 0.0) -> None:
        """Call it in so many seconds, and then as it returns. A known one is called at that time instead."""
        if os.getpid() != self._pid:
            return  # the lock may have been held in the moment of the fork
        with self._changed:
            self._due_s[poll] = self._clock() + after_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, poll: Poll) -> None:
        """Do not call it any more; one call may still be running. Unknown ones are ignored."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._due_s.pop(poll, None)
            self._changed.notify()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread; None while there is nothing to poll."""
        return self._thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._due_s:
                    self._thread = None
                    return
                poll, due_s = min(self._due_s.items(), key=lambda item: item[1])
                left_s = due_s - self._clock()
                if left_s > 0.0:
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
                    continue
                self._due_s[poll] = math.inf
            following_s = self._call(poll)
            with self._changed:
                if self._due_s.get(poll) != math.inf:
                    continue  # it was removed meanwhile, or is wanted earlier
                if following_s is None:
                    del self._due_s[poll]
                else:
                    self._due_s[poll] = self._clock() + following_s

    def _call(self, poll: Poll) -> float | None:
        try:  # one source must not silence the others
            return poll()
        except Exception:
            log.exception("a source of deadlines failed; polling it again in %.0f s", _AFTER_ERROR_S)
            return _AFTER_ERROR_S
