"""What the train loop needs from a coordinator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

# 0.1 had its exceptions here
from torchelastic.errors import NonRetryableException as NonRetryableException
from torchelastic.errors import RetryableException as RetryableException
from torchelastic.errors import StopException as StopException

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from torchelastic.group.peers import Peers
    from torchelastic.join_rules import Dismissal, GroupChange
    from torchelastic.state import State
    from torchelastic.worker_stats import WorkerStats


class GroupMembership:
    """What a coordinator may know of the present group, and what it is notified of."""

    def peers(self) -> Peers | None:
        """The present group, for saving and restoring together. None: it is not known, and rank 0 does it alone."""
        return None

    def nobody_has_progress(self) -> bool | None:
        """Whether the new group has only fresh or unusable states, so that a checkpoint is wanted. None: not known."""
        return None

    def state_changed(self, state: State, *, synced: bool) -> None:
        """The state was rolled back (`synced` False) or is now in sync with the group (True)."""

    def may_commit(self) -> bool:
        """Whether a step that was done may count, asked right before; if not, it is undone as if it had failed.

        Raises:
            RuntimeError: why it may not.
        """
        return True

    def why_failed(self, error: Exception) -> Exception:
        """Why a step has failed, as far as this knows it better than the error that it has ended with."""
        return error

    def step_committed(self) -> None:
        """A step has succeeded on this rank and will not be undone."""

    def somebody_leaves(self) -> bool:
        """Whether a member of the present group was asked to leave the run, so that a checkpoint may be wanted."""
        return False

    def leaves_last(self) -> bool:
        """After StopException: whether this worker leaves a run that cannot go on without newcomers.

        True on one worker at most, one whose state is the best there is: it saves a checkpoint before it goes.
        """
        return False

    def loop_was_left(self) -> None:
        """The loop was left, also by an error, and nobody has ended the run: this worker takes no further part in it.

        Called when the loop's iterator is closed or collected, or raises.
        """

    def fails_for_good(self) -> None:
        """`train` is about to raise an error that a new process would run into again: none is to be started."""

    def computes_wrong(self, step: int, why: str) -> None:
        """This worker was found to compute wrong, in this step: it leaves the run, and none is started in its place."""

    def group_change(self, *, in_sync: bool) -> GroupChange | None:  # noqa: ARG002 - part of the contract
        """How the present group differs from the last one in which a step has succeeded; see `join_rules`.

        Asked when something has failed, before `on_error`; `in_sync`: in the sync. None: not at all, or not known.
        """
        return None

    def go_on_without(self, change: GroupChange, error: str) -> None:
        """The newcomers are to end, for an error of this rank that is new: asked before `on_error`."""

    def dismissal(self, *, may_wait: bool) -> Dismissal | None:  # noqa: ARG002 - as above
        """Why the others of the group go on without this worker, which was new in it; None: they do not.

        Asked when something has failed, after `on_error`.

        Args:
            may_wait: a moment, until the others may have failed too.
        """
        return None

    def wait_for_as_many(self, change: GroupChange) -> None:
        """The next group is to have at least as many workers as the last one in which a step has succeeded."""

    def saving(self) -> AbstractContextManager[None]:
        """Around what a save does on the training thread, on every rank: however long it takes, it is no hang."""
        return nullcontext()

    def slow_section(self) -> AbstractContextManager[None]:
        """For user code in a step: `with coordinator.slow_section():` around what takes long, and is no hang.

        An evaluation or a large file that one rank writes while the others wait in a collective, for example. On any
        rank, on its training thread; its stack may stand still. How long the others wait is bounded by the time-out of
        collectives alone. The default does nothing.
        """
        return nullcontext()


class Deadlines:
    """What a coordinator may do for a worker whose time ends: only `train(..., lifetime=)` asks for it."""

    #: With how few members the run can go on.
    min_workers: int = 1

    def deadline_is_near(self, own: bool) -> bool:
        """Called after each committed step: whether the deadline of any rank of the group is near.

        It may be said some steps after that rank has reported it (`own`), but after the same step on all ranks. The
        default knows no group.
        """
        return own

    def leave(self) -> None:
        """This worker has to go: it is to leave the run at the end of a step, while the others train on."""

    def stop_early(self) -> None:
        """All members of the group stop after this step, to go on in another start of the run, which is not closed."""


class Coordinator(GroupMembership, Deadlines, ABC):
    """Gathers workers, says when to stop, and is notified of progress and errors. One object per worker process.

    These are the nine methods of 0.1. What came later is in the two classes that it inherits from, with answers that
    are right for a coordinator which knows nothing of it, so that one written for 0.1 works unchanged. Every method is
    called on the training thread, on every rank, in the order documented in `torchelastic.train_loop`.
    """

    #: Whether the run has ended for this process; the train loop sets it, and begins none any more.
    run_is_over: bool = False

    @abstractmethod
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Leave the present group, wait for the next one; returns (store, rank, world_size).

        Raises:
            StopException: the run is closed, or this worker was asked to leave it.
            NonRetryableException: no group can be had (a time-out, for example).
        """

    @abstractmethod
    def init_process_group(self) -> None:
        """Make `torch.distributed`'s default group of the members found by the barrier. RuntimeError: try again."""

    @abstractmethod
    def should_save_checkpoint(self) -> bool:
        """Whether the coordinator wants a checkpoint after this step; the state is asked too."""

    @abstractmethod
    def should_rendezvous(self, state: State) -> bool:
        """Whether to leave the group now, after a committed step, without undoing anything; equal on all ranks."""

    @abstractmethod
    def should_stop_training(self) -> bool:
        """Whether the run is over."""

    @abstractmethod
    def signal_training_done(self) -> None:
        """This worker has no more to train: ends the run for everybody."""

    @abstractmethod
    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:
        """Hears what the step reported, after each committed step."""

    @abstractmethod
    def report_progress(self, state: State) -> None:
        """Called last, after each committed step."""

    @abstractmethod
    def on_error(self, e: BaseException) -> None:
        """Notified of each error before it is handled or raised."""
