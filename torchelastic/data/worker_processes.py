"""Which processes a DataLoader has started, and whether they are still there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")


class WorkerProcesses:
    """The persistent worker processes of one DataLoader, which does not tell who they are."""

    def __init__(self) -> None:
        self._processes: set[BaseProcess] = set()

    def started_by(self, start: Callable[[], T]) -> T:
        """Call this, and take whatever processes it starts for the DataLoader's; none: they are those of before."""
        others = set(multiprocessing.active_children())
        result = start()
        self._processes = set(multiprocessing.active_children()) - others or self._processes
        return result

    def have_died(self) -> bool:
        """Whether one is gone. DataLoader would notice too, but only after waiting five seconds for its answer."""
        return not all(process.is_alive() for process in self._processes)

    def forget(self) -> None:
        """They are no longer used."""
        self._processes = set()
