"""What a train loop does about its failures: counts them, says what follows, and notifies the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
from torchelastic.coordinator import Coordinator
from torchelastic.error_text import in_one_line
from torchelastic.errors import ComputesWrongError, NonRetryableException, is_retryable
from torchelastic.join_rules import AfterError, GroupChange, after_error
from torchelastic.repeated_failures import SAME_FAILURES, RepeatedFailures, is_final, new_process_may_help
from torchelastic.text import counted, listed

log = logging.getLogger(__name__)


class LoopFailures:
    """The failures of one run of one worker; on the training thread.

    Args:
        coordinator: is notified of each.
        checkpoints: of the loop.
        most: how many in a row, without a committed step between them, end the run; asked anew at each.
    """

    def __init__(self, coordinator: Coordinator, checkpoints: LoopCheckpoints, most: Callable[[], int]) -> None:
        self._coordinator, self._checkpoints, self._most = coordinator, checkpoints, most
        self._repeated = RepeatedFailures()

    def committed(self) -> None:
        """A step has succeeded."""
        self._repeated.committed()

    def ends_with(self, error: BaseException) -> None:
        """An error that is not tried again is about to be raised as it is."""
        self._coordinator.on_error(error)
        if is_final(error):
            self._coordinator.fails_for_good()
        if isinstance(error, ComputesWrongError):
            self._coordinator.computes_wrong(error.step, in_one_line(error))

    def failed(
        self,
        error: Exception,
        rank: int,
        *,
        in_user_code: bool = False,
        in_sync: bool = False,
        is_undone: bool = True,
    ) -> AfterError:
        """A step, a sync, or what is between them has failed: the group is given up, and what follows is logged.

        Args:
            error: with its traceback.
            rank: of this worker in the group.
            in_user_code: whether a step or a hook of the state failed, and not the forming of a group.
            in_sync: whether it was `State.sync`.
            is_undone: whether there is a snapshot to go back to.

        Returns:
            What to do. RAISED: raise the error as it is.

        Raises:
            NonRetryableException: the others of the group go on without this worker.
        """
        change = self._coordinator.group_change(in_sync=in_sync)
        times = self._repeated.failed(error, in_user_code=in_user_code)
        is_over = not is_retryable(error) or times >= SAME_FAILURES
        after = after_error(
            change,
            is_over=is_over or self._are_too_many,
            may_be_theirs=(is_undone or is_retryable(error)) and not _is_of_rendezvous(error),
            seen_in=self._repeated.seen_in(error),
        )
        if after is AfterError.RAISED and not is_over:
            after = AfterError.AGAIN  # `raise_after_too_many` raises another one
        if change is not None and after is AfterError.WITHOUT_NEWCOMERS:  # before the others learn that it has failed
            self._coordinator.go_on_without(change, in_one_line(error))
        self._coordinator.on_error(error)
        if self._is_dismissed(error, rank, is_own=is_over or times > 0, is_over=is_over):
            return AfterError.RAISED
        if after is AfterError.RAISED:
            self._say_that_it_ends(error)
            if in_user_code:
                self._say_how_to_go_back()
        elif change is None or after is AfterError.AGAIN:
            more = "" if is_undone else "; what the step had changed was not undone"
            log.warning("failure %d in a row: %s%s", self._repeated.count, in_one_line(error), more)
        else:
            self._repeated.came_in(error, change.kind)
            log.warning("%s: %s", in_one_line(error), _what_follows(change, after))
            if after is AfterError.WITH_AS_MANY:
                self._coordinator.wait_for_as_many(change)
        self._checkpoints.failed()
        return after

    def raise_after_too_many(self) -> None:
        """Asked before each further attempt. Raises RuntimeError."""
        if self._are_too_many:
            count, last_error = self._repeated.count, self._repeated.last_error
            assert last_error is not None
            error = RuntimeError(
                f"{count} failures in a row without a committed step (the bound is {self._most()}: max_failures, or "
                f"torchelastic.train_loop.MAX_FAILURES); the last one: {in_one_line(last_error)}"
            )
            self._coordinator.on_error(error)
            raise error from last_error

    @property
    def _are_too_many(self) -> bool:
        most, count = self._most(), self._repeated.count
        return count >= most > 0 or (most <= 0 and count > 0)

    def _say_that_it_ends(self, error: Exception) -> None:
        if not is_retryable(error):
            ends_for_good = is_final(error)
        else:  # it is deterministic: another attempt would end in the same way, here and, as a rule, in a new process
            log.warning("failure %d in a row: %s", self._repeated.count, in_one_line(error))
            log.error(
                "the same error %d times at one step: it is not tried again (for an error that may go away, raise "
                "torchelastic.RetryableException)",
                SAME_FAILURES,
            )
            ends_for_good = not new_process_may_help(error)
        if ends_for_good:
            self._coordinator.fails_for_good()
        if isinstance(error, ComputesWrongError):
            self._coordinator.computes_wrong(error.step, in_one_line(error))

    def _say_how_to_go_back(self) -> None:
        """Bytes that are intact may be those of a loss that had become NaN before: then each start ends alike."""
        step = self._checkpoints.restored_step
        if step:
            log.error(
                "it came in the first step after the checkpoint of step %d was restored: if that may be the cause (a "
                "loss that is NaN), go on from an older one with `torchelastic checkpoint rewind FOLDER --to %d`",
                step,
                step - 1,
            )

    def _is_dismissed(self, error: Exception, rank: int, *, is_own: bool, is_over: bool) -> bool:
        """Whether the others of the group, who had the state before, go on without this worker: it ends.

        Raises:
            NonRetryableException: what has failed here was only the group, which they have given up.
        """
        dismissal = self._coordinator.dismissal(may_wait=is_over)
        if dismissal is None:
            return False
        reason = f"the others go on without this worker, as their first step with it had a new error: {dismissal.error}"
        log.error("rank %d: %s%s", rank, reason, "; it is not started again" if dismissal.is_for_good else "")
        if dismissal.is_for_good:
            self._coordinator.fails_for_good()
        if not is_own:
            raise NonRetryableException(reason) from error
        return True


def _is_of_rendezvous(error: Exception) -> bool:
    """Whether this project's own code has found that no group can be had, or that its members may not go on."""
    return isinstance(error, NonRetryableException) and not is_final(error)


def _what_follows(change: GroupChange, after: AfterError) -> str:
    if after is AfterError.WITHOUT_NEWCOMERS:
        return (
            f"it came in the first step with {listed(change.newcomers)}, and no step before had it: it is undone, and "
            "the others go on without what has joined, which ends"
        )
    missing = change.former_size - change.world_size
    return (
        f"it came in the first step after {counted(missing, 'worker')} of {change.former_size} had been lost, and no "
        f"step before had it: it is undone, and comes again when there are {change.former_size} workers; until then "
        "the state is kept and waits, at most for the time-out of the rendezvous (--rdzv-timeout)"
    )
