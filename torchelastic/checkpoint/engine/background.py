"""The one thread of a process that finishes what saves have begun, in their order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs one after the other, beside the training thread; there is room for a few.

    Made and used on the training thread of one process, never in a child of fork. The thread starts with the first job
    and ends with the process, or behind `close`: wait for what must not be lost.

    Args:
        slots: how many of them may be taken at once.
        monotonic: a clock in seconds that never goes back.
    """

    def __init__(self, slots: int = 2, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._held = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_working(self) -> bool:
        """Whether a slot is taken."""
        return self._held > 0

    @property
    def is_full(self) -> bool:
        """Whether `reserve` would wait."""
        return self._held >= self._slots

    def reserve(self, save: SaveId, timeout_s: float) -> None:
        """Takes a slot, for `release`; waits for one if it must, and says so.

        Args:
            save: what it is for.
            timeout_s: for how long to wait.

        Raises:
            CheckpointError: all stay busy for so long.
        """
        if os.getpid() != self._pid:
            raise CheckpointError("this process is a child of the one that saves: save where the manager was made")
        began_s, is_full = self._monotonic(), self.is_full
        if is_full:
            log.warning("%s waits: all slots are busy with saves that are not finished yet", save)
        with self._changed:
            if not self._changed.wait_for(lambda: self._held < self._slots, timeout_s):
                raise CheckpointError(
                    f"{self._slots} saves are still being finished after {timeout_s:g} s: save more rarely, or to a "
                    "faster tier"
                )
            self._held += 1
        if is_full:
            waited_s = self._monotonic() - began_s
            publish_metric("torchelastic", "checkpoint.slot_wait.duration.ms", 1000 * waited_s)

    def release(self) -> None:
        """A slot that was reserved is needed no more; from any thread."""
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    def submit(self, job: Job) -> None:
        """Have a job run after those before it; what it raises is logged."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torchelastic-checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is nothing to do; false: there is, after that time. Not on the background thread."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self) -> None:
        """The thread ends when it has nothing to do, also one that a later job starts. From any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except BaseException as error:  # nothing of the background may end the training, or its thread
                text = "a checkpoint could not be finished; training goes on, the one before stays the latest: %s"
                log.error(text, error, exc_info=None if isinstance(error, CheckpointError) else error)
            del job  # it holds the tensors of a stage
            with self._changed:
                self._busy = False
                self._changed.notify_all()
