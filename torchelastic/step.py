"""One attempt at a step: what the train loop yields, and what user code runs inside `with`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torchelastic.group.step_course import RehearsedError, SkippedError
from torchelastic.state import State
from torchelastic.worker_stats import WorkerStats

if TYPE_CHECKING:
    from torchelastic.train_loop import TrainLoop


class Step:
    """One attempt at a step, used with `with`; succeeds as a whole or is undone.

    Attributes:
        committed: whether it has succeeded.
        is_rehearsal: whether it was computed only to be compared with the next attempt, and is undone.
        is_last: whether the run ends with it, if it succeeds.
        worker_stats: what it reported, or None.
    """

    __slots__ = ("_entered", "_loop", "_snapshot", "committed", "is_last", "is_rehearsal", "worker_stats")

    def __init__(self, loop: TrainLoop) -> None:
        self.committed = self.is_last = self.is_rehearsal = False
        self.worker_stats: WorkerStats | None = None
        self._entered = False
        self._loop = loop
        self._snapshot = loop.snapshot()
        loop.observer.step_begins()

    def returned(self, value: Any) -> None:
        """Take what a train step returned: None, a WorkerStats, or (state, worker_stats). Raises TypeError."""
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], State):
            self._loop.state, value = value
        if value is not None and not isinstance(value, WorkerStats):
            raise TypeError(
                f"train_step returned a {type(value).__name__}: return None, a WorkerStats, or (state, worker_stats)"
            )
        self.worker_stats = value

    def stop_training(self) -> None:
        """End the run for everybody with this step; one worker that calls it is enough.

        After the `with` block it returns when all workers have finished. Inside the block the run ends as soon as the
        step has succeeded; if it fails, it is undone and repeated, and nothing ends.
        """
        self.is_last = True
        if self.committed:
            self._loop.stop_after(self)

    def has_committed(self) -> bool:
        """Whether the step has succeeded; NotImplementedError if it was not used with `with`."""
        if not self._entered:
            raise NotImplementedError("write `with step:` around the body of a torchelastic.steps loop")
        return self.committed

    def __enter__(self) -> Step:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False] | bool:
        self._loop.observer.step_ends()
        snapshot, self._snapshot = self._snapshot, None  # its memory is free for the next one, once this returns
        if error is None:
            try:
                self.committed = self._loop.commit(snapshot)
            except RehearsedError:
                return self._rehearsed(snapshot)
            if self.is_last:
                self.stop_training()
            return False
        if isinstance(error, StopIteration):
            self._loop.check_is_end(error)
            self._loop.observer.training_done()
            self._loop.coordinator.signal_training_done()
            return True
        if not isinstance(error, Exception):
            self._loop.observer.step_undone(type(error).__name__)
            return False  # Ctrl-C, exit, a generator being closed
        if isinstance(error, RehearsedError):
            return self._rehearsed(snapshot)
        if isinstance(error, SkippedError):
            self.committed = self._loop.skip(snapshot)
            return True
        return self._loop.undo(self._loop.coordinator.why_failed(error), snapshot)

    def _rehearsed(self, snapshot: Any) -> Literal[True]:
        self.is_rehearsal, self.is_last = True, False
        self._loop.state.rehearsed(snapshot)
        return True
