"""The one place that says that saves are skipped: in the log, sparingly, and as metrics. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torchelastic.checkpoint.store.host_memory.room import held_bytes
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

_GROUP = "torchelastic"


class SkippedSaves:
    """Counts the saves that were skipped, and warns of the first, the second, the fourth, and so on.

    A long run may skip a save per minute: each of these warnings says how many there were. Metrics tell of every one.
    May be used by several threads.

    Args:
        publish: takes group, name and value of a metric.
    """

    def __init__(self, publish: Callable[[str, str, float], None] = publish_metric) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str | None = None) -> int:
        """How many were skipped, for this reason or in all."""
        with self._lock:
            return self._counts.total() if reason is None else self._counts[reason]

    def skipped(self, what: str, reason: str, because: str) -> None:
        """A save was skipped.

        Args:
            what: which one, such as "step 20 in /dev/shm/jobs/145".
            reason: one word, for the metric; see `NotSaved`.
            because: the numbers, the error and the remedy, for the warning.
        """
        with self._lock:
            self._counts[reason] += 1
            of_reason, number = self._counts[reason], self._counts.total()
        self._publish(_GROUP, f"checkpoint.memory.skipped.{reason}", of_reason)
        self._publish(_GROUP, "checkpoint.memory.skipped", number)
        if of_reason & (of_reason - 1) == 0:  # a power of two; each reason is heard at its first time
            log.warning(
                "the checkpoint of %s was skipped, the one before it stays: %s%s",
                what,
                because,
                f" ({number} saves have been skipped so far)" if number > 1 else "",
            )

    def publish_held(self, folder: Path) -> int:
        """Publishes how much memory a container takes on this host, in bytes, and returns it."""
        size_bytes = held_bytes(folder)
        self._publish(_GROUP, "checkpoint.memory.held.bytes", size_bytes)
        return size_bytes
