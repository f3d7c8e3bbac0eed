"""The steps of a run that a framework drives from a loop of its own: begun, committed or undone where it says."""

from __future__ import annotations

from collections.abc import Iterator

from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.lifetime.requeue import StoppedEarly
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous.records import RoundState
from torchelastic.state import State
from torchelastic.step import Step
from torchelastic.train_loop import TrainLoop


class DrivenSteps:
    """The steps of one run; used on the training thread.

    Args:
        coordinator: finds the other workers.
        state: of the training.
        checkpoint: saves beside the framework's own checkpoints; None: nothing does.

    Attributes:
        current: the step that has begun, and was neither committed nor undone.
    """

    def __init__(self, coordinator: CoordinatorP2P, state: State, checkpoint: CheckpointManager | None) -> None:
        self._coordinator, self._state, self._checkpoint = coordinator, state, checkpoint
        self.current: Step | None = None
        self._loop: TrainLoop | None = None
        self._steps: Iterator[Step] = iter(())

    def begin(self) -> bool:
        """A step begins, in a new group where one is wanted; false: the run has ended, on the other workers or here."""
        if self._loop is None:
            self._loop = TrainLoop(self._coordinator, self._state, self._checkpoint, None)
            self._steps = self._loop.steps()
        step = next(self._steps, None)
        self.current = None if step is None else step.__enter__()
        return step is not None

    def commit(self) -> bool:
        """The step counts; false: it must not, and was undone."""
        step, self.current = self.current, None
        assert step is not None
        step.__exit__(None, None, None)
        return step.committed

    def undo(self, error: BaseException) -> bool:
        """The step has failed; false: its error is to be raised, or no step has begun."""
        step, self.current = self.current, None
        return step is not None and bool(step.__exit__(type(error), error, error.__traceback__))

    @property
    def has_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint of the manager's, and has committed nothing since."""
        return self._loop is not None and self._loop.restored_step is not None

    @property
    def came_late(self) -> bool:
        """Whether the others had finished when this worker came: it has the state that it began with."""
        return self._coordinator.rank < 0 and self._loop is not None and not self._loop.has_left

    def raise_if_left(self, done: int, of: object) -> None:
        """Raise StoppedEarly if this worker was asked to leave the run, which has not finished.

        Args:
            done: steps, as the framework counts them.
            of: so many.
        """
        if self._loop is None or not self._loop.has_left:
            return
        because = f"left the training at step {done} of {of}, as it was asked to"
        is_left_alone = self._coordinator.rendezvous.round.state is RoundState.BROKEN
        raise StoppedEarly(because, step=done, others_go_on=not is_left_alone)

    def close(self) -> None:
        """This worker trains no further, whatever the reason."""
        if self._loop is not None:
            self._steps.close()  # type: ignore[attr-defined]  # it is a generator
