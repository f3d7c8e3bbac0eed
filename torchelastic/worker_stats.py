"""What a train step may report about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WorkerStats(ABC):
    """Progress of one worker, compared between workers to find stragglers."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Work per second in any unit that all workers share (samples, steps), or None while it is not known."""


class SimpleWorkerStats(WorkerStats):
    """A progress rate that is known already.

    Args:
        progress_rate: work per second, or None.
    """

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        """The rate given at construction."""
        return self.progress_rate
