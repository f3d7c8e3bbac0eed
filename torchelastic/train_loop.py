"""The algorithm.

    until the run is over:
        form a group: rendezvous, process group, checkpoint if nobody has progress, sync
        until the run is over or the group has to change:
            snapshot -> train step -> commit -> monitor, deadline, checkpoint, agree, report

A step that fails with a RuntimeError is undone and repeated in a new group, unless the same error has come at it three
times; a step that has committed is never undone, whatever fails after it. StopIteration from the step, or
`Step.stop_training`, ends the run for everybody; leaving a `steps` loop does not. Any other exception is the user's: it
is raised as it is. The order of the calls is that of torchelastic 0.1.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
from torchelastic.checkpoint.policy import SavePolicy
from torchelastic.coordinator import Coordinator
from torchelastic.ended_iterators import ended_by, is_of_iterator
from torchelastic.error_text import in_one_line
from torchelastic.errors import (
    DrainedException,
    NonRetryableException,
    RetryableException,
    StopException,
    UnfitError,
    is_retryable,
)
from torchelastic.group.step_course import SkippedError
from torchelastic.join_rules import AfterError
from torchelastic.loop_failures import LoopFailures
from torchelastic.loop_observer import LoopObserver, notify_all
from torchelastic.metrics.api import get_elapsed_time_ms, publish_metric
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.processes.script_import import check_not_importing
from torchelastic.rendezvous.own_agent import ONE_RUN_PER_START
from torchelastic.rendezvous.records import StateStatus
from torchelastic.state import (
    State,
    call_sync,
    check_can_roll_back,
    check_hooks,
    check_train_step,
    have_changed,
    tensor_versions,
)
from torchelastic.step import Step

if TYPE_CHECKING:
    from torchelastic.lifetime.deadline_monitor import Lifetime

log = logging.getLogger(__name__)

#: How many failures in a row, without a committed step between them, end the run. Read anew at each failure.
MAX_FAILURES = 100

RUN_IS_OVER = (
    f"the run of this coordinator is over: {ONE_RUN_PER_START}; a process that trains alone creates another "
    "CoordinatorP2P() for its next train()"
)

TrainStep = Callable[[Any], Any]


def train(
    coordinator: Coordinator,
    train_step: TrainStep,
    state: State,
    *,
    checkpoint: CheckpointManager | SavePolicy | None = None,
    lifetime: Literal["auto"] | Lifetime | None = None,
    max_failures: int | None = None,
) -> State:
    """Train until the step raises StopIteration on any rank; every rank calls this, on its main thread.

    Args:
        coordinator: finds the other workers.
        train_step: called with the state; returns None, a `WorkerStats`, or (state, worker_stats).
        state: what must survive failures; every rank builds it with the same arguments.
        checkpoint: a manager, which says where checkpoints go (a `TieredCheckpointManager` also says when); or a
            policy, which says when, for the manager that `set_checkpoint_manager` was given. Default: that manager,
            else none are taken. `should_save_checkpoint` of the state and the coordinator count beside a policy.
        lifetime: "auto", or a `torchelastic.lifetime.Lifetime`: find out when this machine ends, save at the last safe
            step before that, and stop; or leave, while others go on. Start it on the main thread. None: do not care.
        max_failures: failures in a row, without a committed step, after which to give up; default: `MAX_FAILURES`.

    Returns:
        The state at the end of the run.

    Raises:
        StoppedEarly: (of `torchelastic.lifetime`, a SystemExit) stopped before a deadline: start it again.
        NonRetryableException: no group could be had, nobody holds a state to go on from, the save before a deadline
            failed, the coordinator's run was over before, or a process that `multiprocessing` has started imports the
            script.
        RuntimeError: of the step or the state, the third time that the same one came at one step; or too many failures
            in a row, the last one being the cause.
        UnsavableError: (of `torchelastic.errors`: a NonRetryableException, a TypeError) there is a checkpoint manager,
            and the state holds what no checkpoint can, at the start or after the first step of the run.
        TypeError: `coordinator` is a class, `state` is no State, a hook or `train_step` cannot be called as it is
            written, `lifetime` is none, or the step returned something else.
        ValueError: an environment variable that should hold a deadline holds something else, or the state may go back
            to an older checkpoint (`ComputeCheck`), and the manager is no `TieredCheckpointManager`.
        Exception: whatever else the step or the state raised, unchanged.
    """
    check_train_step(train_step)
    loop = TrainLoop(coordinator, state, checkpoint, max_failures, lifetime)
    try:
        for step in loop.steps():
            with step:
                step.returned(train_step(loop.state))
    finally:
        loop.observer.over()
    return loop.state


def steps(
    coordinator: Coordinator,
    state: State,
    *,
    checkpoint: CheckpointManager | SavePolicy | None = None,
    lifetime: Literal["auto"] | Lifetime | None = None,
    max_failures: int | None = None,
) -> Iterator[Step]:
    """The same loop for people who keep their own; arguments and errors as for `train`.

    ::

        for step in torchelastic.steps(coordinator, state):
            with step:
                ...  # a failure in here is rolled back, and the step comes again

    The run ends for everybody when any worker raises StopIteration inside the block or calls `step.stop_training()`. A
    worker that leaves the loop in another way (break, return, `close()`, an error) has not finished: it takes no
    further part in the run, and the others go on without it.
    """
    return TrainLoop(coordinator, state, checkpoint, max_failures, lifetime).steps()


class TrainLoop:
    """One run of one worker; see the module's docstring."""

    def __init__(
        self,
        coordinator: Coordinator,
        state: State,
        checkpoint: CheckpointManager | SavePolicy | None,
        max_failures: int | None,
        lifetime: Literal["auto"] | Lifetime | None = None,
    ) -> None:
        check_not_importing("trains")
        if isinstance(coordinator, type):
            raise TypeError(f"coordinator is the class {coordinator.__name__}: make one, {coordinator.__name__}(..)")
        if not isinstance(state, State):
            raise TypeError(f"state is a {type(state).__name__}: it must be a torchelastic.State (or a ModelState)")
        self.coordinator = coordinator
        self.state = state
        self.rank = -1
        self.has_left = False  # asked to, from a run that has not finished
        self._world_size = 1
        self._checkpoints = LoopCheckpoints(coordinator, checkpoint)
        self._save_if_due: Callable[[State], None] = self._checkpoints.after_step
        meter = this_worker()
        observers = [LoopDurations(), meter, self._checkpoints]
        if lifetime is not None:
            from torchelastic.lifetime.deadline_monitor import lifetime_of
            from torchelastic.lifetime.loop_lifetime import LoopLifetime

            deadlines = LoopLifetime(coordinator, self._checkpoints, lifetime_of(lifetime))
            self._save_if_due = deadlines.after_step
            observers.append(deadlines)
        self.observer = notify_all(*observers)
        self._checkpoints.check(state)
        check_hooks(state, saves=self._checkpoints.manager is not None)
        self._failures = LoopFailures(
            coordinator, self._checkpoints, lambda: MAX_FAILURES if max_failures is None else max_failures
        )
        self._said_no_undo = False
        self._ended = ""  # the iterator that an error has ended since the last committed step
        self._referred: list[tuple[Any, int]] | None = None
        meter.publish_to_parent()
        meter.set_up_log()

    @property
    def restored_step(self) -> int | None:
        """That of the checkpoint in tiers from which the run goes on, until a step is committed; None: of none."""
        return self._checkpoints.restored_step

    def steps(self) -> Iterator[Step]:
        """Yield one step after the other until the run is over."""
        step: Step | None = None
        if self.coordinator.run_is_over:
            raise NonRetryableException(RUN_IS_OVER)
        try:
            while self._next_group():
                while not self.coordinator.should_stop_training():
                    step = Step(self)
                    yield step
                    if step.is_rehearsal:
                        continue  # the same group computes it once more
                    if not step.has_committed() or step.is_last or self._must_leave_group(step):
                        break
                self.observer.group_left()
            self._checkpoints.run_ended(self.state)
        except StopException as stop:
            log.info("the run is closed for this worker: %s", stop)
            self.has_left = isinstance(stop, DrainedException)
        except BaseException as error:
            # by break, return or close(), or by an error on its way: a generator cannot know which
            if not self.coordinator.run_is_over:
                self._was_left(is_said=isinstance(error, GeneratorExit) and step is not None and step.committed)
            raise
        finally:
            self.observer.over()
        self.coordinator.run_is_over = True
        self.observer.returns(has_left=self.has_left)

    def stop_after(self, step: Step) -> None:
        """End the run for everybody after a step that was committed.

        A peer that lost this very step is synchronized first, in one more group.
        """
        if self.coordinator.should_stop_training():
            return
        self._must_leave_group(step)
        try:
            self.coordinator.signal_training_done()
            while self._next_group():
                self.coordinator.signal_training_done()
            self._checkpoints.run_ended(self.state)
        except StopException as stop:
            log.info("the run is closed for this worker: %s", stop)
        self.coordinator.run_is_over = True

    def _was_left(self, *, is_said: bool) -> None:
        """What the script does from here on, after an error too, may take long: nobody is to wait for it."""
        self.coordinator.run_is_over = True
        if is_said and self._world_size > 1 and not self.coordinator.should_stop_training():
            log.warning(
                "rank %d left its steps() loop, which does not end the run: the others go on without this worker; to "
                "end the run for everybody call step.stop_training(), or raise StopIteration inside the block",
                self.rank,
            )
        self.coordinator.loop_was_left()

    # --- the parts, in the order in which they happen ---------------------------------------------------------------

    def _next_group(self) -> bool:
        """Try until there is a group; False: the run is over. Raises StopException: it is for this worker."""
        while not self.coordinator.should_stop_training():
            self._failures.raise_after_too_many()
            if self._form_group():
                return True
        return False

    def _form_group(self) -> bool:
        """Rendezvous, process group, checkpoint, sync. False: it failed, try again. Raises StopException: no more."""
        self.observer.group_wanted()
        snapshot = self.state.snapshot()
        check_can_roll_back(self.state, snapshot)
        try:
            _, self.rank, self._world_size = self.coordinator.rendezvous_barrier()
            self.coordinator.init_process_group()
            self.observer.group_formed(self.coordinator, self.rank, self._world_size)
        except StopException:
            if self.coordinator.leaves_last():
                self._checkpoints.save_alone(self.state)
            raise
        except Exception as error:
            if self._failures.failed(error, self.rank) is AfterError.RAISED:
                raise
            return False  # there was no group yet, so there is nothing to undo
        try:
            self._checkpoints.enter_group(self.state, self.rank)
            self.observer.sync_begins()
            call_sync(self.state, self._world_size, self.rank)
            self.observer.in_sync(self.state)
            self.coordinator.state_changed(self.state, synced=True)
        except StopException:
            raise
        except Exception as error:
            after = self._failures.failed(error, self.rank, in_user_code=True, in_sync=True)
            if after is AfterError.RAISED:
                raise
            self._roll_back(snapshot, after)
            return False
        return True

    def _must_leave_group(self, step: Step) -> bool:
        """All that follows a committed step. Whatever fails in here costs a new group at most, never the step."""
        try:
            self.coordinator.monitor_progress(self.state, step.worker_stats)
            self._save_if_due(self.state)
            leave = self.coordinator.should_rendezvous(self.state)
            if leave:
                self.coordinator.state_changed(self.state, synced=False)  # it may have been found to be of no use
                self.state.hand_over(self.coordinator.somebody_leaves())
            else:
                self.coordinator.report_progress(self.state)
        except StopIteration:
            self.coordinator.signal_training_done()
            return True
        except Exception as error:
            if self._failures.failed(error, self.rank) is AfterError.RAISED:
                raise
            return True
        return leave

    # --- failures -----------------------------------------------------------------------------------------------------

    def commit(self, snapshot: Any) -> bool:
        """Called by the step that was done: makes it count, and from here on nothing can undo it.

        False: it must not count, and was undone.
        """
        try:
            if self.state.step_course is not None:
                self.state.step_course.end()
            if not self.coordinator.may_commit():
                raise RetryableException("the step must not count: another group may be training by now")
        except SkippedError:
            return self.skip(snapshot)
        except (RuntimeError, NonRetryableException) as error:
            self._undo_or_raise(error, snapshot)
            return False
        self._say_if_not_copied()
        try:
            self.state.commit()
        except BaseException as error:
            self._failures.ends_with(error)
            raise
        self._ended = ""
        self._failures.committed()
        self.observer.step_committed()
        self.coordinator.step_committed()
        return True

    def skip(self, snapshot: Any) -> bool:
        """Called by a step that is to be left out. False: not yet, it was undone and comes again."""
        course = self.state.step_course
        if course is None:
            raise NonRetryableException("skip_step was called on another state than the one that train() has")
        try:
            skip = course.agree_to_skip()
        except RuntimeError as error:
            self._undo_or_raise(error, snapshot)
            return False
        samples = self.state.skip(snapshot)
        log.warning("%s (%d samples)", skip.text, samples)
        self._failures.committed()
        self.observer.step_skipped(skip.reason, samples)
        self.coordinator.step_committed()
        return True

    def _undo_or_raise(self, error: Exception, snapshot: Any) -> None:
        known = self.coordinator.why_failed(error)
        if not self.undo(known, snapshot):
            raise known

    def undo(self, error: Exception, snapshot: Any) -> bool:
        """Called by the step that has failed: rolls back. False: the error is to be raised as it is.

        Raises:
            UnfitError: in its place, where it says more than an error of torch.
        """
        self._ended = ended_by(error)
        unfit = _why_unfit(error)
        said = error if unfit is None else unfit
        is_undone = snapshot is not None
        try:
            after = self._failures.failed(said, self.rank, in_user_code=True, is_undone=is_undone)
        finally:
            self.observer.step_undone(in_one_line(said), is_undone=is_undone or not is_retryable(said))
        if after is AfterError.RAISED:
            if unfit is not None:
                raise unfit from error
            return False
        self._roll_back(snapshot, after)
        return True

    def check_is_end(self, stop: StopIteration) -> None:
        """Called by the step that ends the run. Raises NonRetryableException: only an iterator that failed is over."""
        if self._ended and is_of_iterator(stop):
            error = NonRetryableException(
                f"{self._ended} was ended by the error for which this step is repeated, and not by its data, so this "
                "StopIteration is no end of the run: make the iterator anew in the step, or use ElasticLoader or "
                "ElasticStream, which go on where they were"
            )
            self._failures.ends_with(error)
            raise error from stop

    def snapshot(self) -> Any:
        """What undoes the step that begins now; None: nothing will, which is said once, by rank 0."""
        snapshot = self.state.snapshot()
        if snapshot is None and not self._said_no_undo:
            self._said_no_undo = True
            if self.rank == 0:
                log.warning(
                    "%s.snapshot() returns None: a step that fails is not undone, and what it has changed stays where "
                    "sync() does not repair it; write snapshot() and apply(snapshot), or use ModelState",
                    type(self.state).__name__,
                )
        if self._referred is None:  # the first step tells
            self._referred = tensor_versions(snapshot)
        return snapshot

    def _say_if_not_copied(self) -> None:
        if self.rank == 0 and have_changed(self._referred or ()):
            log.warning(
                "%s.snapshot() returns tensors that the step changes, not copies, so apply() cannot undo a failed "
                "step, and weights may be wrong after it: return copy.deepcopy(..) of them",
                type(self.state).__name__,
            )
        self._referred = []

    def _roll_back(self, snapshot: Any, after: AfterError) -> None:
        """Back to the snapshot; how complete it is now goes to the coordinator, who chooses a source by it."""
        self.state.apply(snapshot)
        self.coordinator.state_changed(self.state, synced=False)
        if after is AfterError.WITH_AS_MANY and self.rank == 0 and self.state.status is StateStatus.COMPLETE:
            self._checkpoints.save_alone(self.state)  # those that it waits for may not come


def _why_unfit(error: Exception) -> UnfitError | None:
    """What to raise in place of an error of torch; None: it says enough itself, or the step has used no torch."""
    if "torch" not in sys.modules:
        return None
    from torchelastic.data.worker_processes import why_unguarded
    from torchelastic.model.ddp_errors import why_unfit

    return why_unguarded(error) or why_unfit(error)


class LoopDurations(LoopObserver):
    """Publishes how long the parts of a loop take, under the names of torchelastic 0.1.

    A part that ends with an error is not published, except for a train step.
    """

    def __init__(self) -> None:
        self._loop_s = self._group_s = self._sync_s = self._step_s = time.monotonic()

    def sync_begins(self) -> None:
        """See `LoopObserver`."""
        self._sync_s = time.monotonic()

    def in_sync(self, state: State) -> None:  # noqa: ARG002 - part of the contract
        """See `LoopObserver`."""
        publish_metric("torchelastic", "state_sync.duration.ms", get_elapsed_time_ms(self._sync_s))
        self._group_s = time.monotonic()

    def step_begins(self) -> None:
        """See `LoopObserver`."""
        self._step_s = time.monotonic()

    def step_ends(self) -> None:
        """See `LoopObserver`."""
        publish_metric("torchelastic", "train_step.duration.ms", get_elapsed_time_ms(self._step_s))

    def group_left(self) -> None:
        """See `LoopObserver`."""
        publish_metric("torchelastic", "inner_train_loop.duration.ms", get_elapsed_time_ms(self._group_s))

    def returns(self, *, has_left: bool) -> None:  # noqa: ARG002 - as above
        """See `LoopObserver`."""
        publish_metric("torchelastic", "outer_train_loop.duration.ms", get_elapsed_time_ms(self._loop_s))
