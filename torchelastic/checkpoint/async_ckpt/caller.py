"""What runs the work of calls in the background; the thread and the processes that do so derive from `AsyncCaller`."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, TimeoutError  # noqa: A004 - the builtin one from Python 3.11 on
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from torchelastic.checkpoint.async_ckpt.agreement import (
    DEFAULT_TIMEOUT_S,
    CallAgreement,
    CallVerdict,
    group_in_use,
    own_rank,
)
from torchelastic.checkpoint.async_ckpt.errors import AsyncCheckpointError, failed_call
from torchelastic.checkpoint.async_ckpt.outcome import CallOutcome, failure_of
from torchelastic.checkpoint.async_ckpt.stages import publish_stage

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

#: In a blocking wait the ranks ask each other at least so often, so that nobody waits long in a collective.
_SLICE_S = 1.0


@dataclass
class _Call:
    """A call that nobody was told the end of. `was_told`: schedule raised for it, and the other ranks may not know."""

    future: Future[CallOutcome] | None = None
    outcome: CallOutcome | None = None
    was_told: bool = False

    def wait(self, timeout_s: float) -> CallOutcome | None:
        """How it ended; None if it has not within so many seconds."""
        if self.outcome is None and self.future is not None:
            try:
                self.outcome = self.future.result(timeout_s)
            except TimeoutError:
                return None
            except CancelledError:
                self.outcome = CallOutcome("it was given up")
        return self.outcome


class AsyncCaller(ABC):
    """Runs requests in the background, oldest first, and tells when all ranks have done the oldest one.

    Used by one thread of the trainer at a time. All methods return or raise within bounded time.

    Args:
        process_group: whose ranks act together; None is the default group, if it is initialised. Asked anew at each
            call, so that a group may be formed anew in between.
        timeout_s: for how many seconds a blocking wait, or a rank that does not come, is waited for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._clock = clock
        self._agreement = CallAgreement(timeout_s, clock=clock)
        self._calls: dict[int, _Call] = {}
        self._acts_alone = False

    @abstractmethod
    def _start(self, request: AsyncRequest, timeout_s: float) -> Future[CallOutcome]:
        """Hand the request to a worker; waits for its `preload_fn`, if it has one, but no longer than `timeout_s`.

        Returns:
            How it ends; a worker's death is an end. It may be cancelled: then nobody asks any more.
        """

    @abstractmethod
    def _give_up(self, call_idx: int) -> None:
        """End the worker that hangs in this call; its other calls fail with it."""

    @abstractmethod
    def _end(self, abort: bool) -> None:
        """End all workers, in bounded time; those that have work left only if `abort`."""

    def schedule_async_call(self, request: AsyncRequest) -> None:
        """Begin a frozen request's work. Not a collective, but every rank has to schedule the same calls.

        Raises:
            ValueError, TypeError: the request cannot be run, or cannot be sent to a worker process.
            AsyncCheckpointError: its `preload_fn` failed, or the worker died before it was through.
        """
        call = self._calls[request.call_idx] = _Call()
        try:
            request.check()
            if request.async_fn is None:
                call.outcome = CallOutcome()
            else:
                call.future = self._start(request, self._timeout_s)
        except BaseException as error:
            if self._group() is None or self._acts_alone:
                self._calls.pop(request.call_idx, None)
            else:  # the others have scheduled it, and hear at their next poll that it failed here
                call.outcome, call.was_told = failure_of(error), True
            raise

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Tell whether the oldest call is done on all ranks; once it was said, the next one is the oldest.

        Called on every rank in step, unless `no_dist`. Among several ranks, a poll that does not block tells what they
        said in the poll before.

        Args:
            blocking: wait until it is, or until `timeout_s` has passed: then the call has failed.
            no_dist: ask this rank only.

        Raises:
            AsyncCheckpointError: the oldest call failed somewhere (it is dropped, so the next one is the oldest), or
                the ranks are not in step.
            RuntimeError: the process group is broken.
        """
        self._acts_alone = no_dist
        if not self._calls:
            return True
        call_idx = next(iter(self._calls))
        group = None if no_dist else self._group()
        return self._is_done_here(call_idx, blocking) if group is None else self._is_done(call_idx, blocking, group)

    def raise_earlier_failure(self) -> None:
        """Raise the failure of a call that is known of without asking anybody, and on all ranks alike; else do nothing.

        Among several ranks that is what they said in their last poll. Called on every rank in step.

        Raises:
            AsyncCheckpointError: a call failed; it is dropped.
        """
        group = None if self._acts_alone else self._group()
        if group is None:
            for call_idx in list(self._calls):
                outcome = self._outcome_of(call_idx, 0.0)
                if outcome is not None and outcome.has_failed:
                    self._drop_failed(call_idx, outcome)
        elif self._calls:
            call_idx = next(iter(self._calls))
            verdict = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._settle_failure(call_idx, verdict, group)

    def close(self, abort: bool = False) -> None:
        """End the workers, in bounded time. No collectives.

        Args:
            abort: at once, and forget all calls: SIGTERM, and SIGKILL after `sigterm_timeout`.
        """
        self._end(abort)
        for call in self._calls.values():
            if call.future is not None:
                call.future.cancel()  # another thread may wait for it
        self._calls.clear()
        self._agreement.clear()

    def knows(self, call_idx: int) -> bool:
        """Whether the call is scheduled and nobody was told its end."""
        return call_idx in self._calls

    @property
    def acts_alone(self) -> bool:
        """Whether the last poll asked this rank only."""
        return self._acts_alone

    def _group(self) -> dist.ProcessGroup | None:
        return group_in_use(self._process_group)

    def _is_done_here(self, call_idx: int, blocking: bool) -> bool:
        outcome = self._outcome_of(call_idx, self._timeout_s if blocking else 0.0)
        if outcome is None:
            if not blocking:
                return False
            outcome = self._timed_out(call_idx)
        if outcome.has_failed:
            self._drop_failed(call_idx, outcome)
        self._calls.pop(call_idx, None)
        return True

    def _is_done(self, call_idx: int, blocking: bool, group: dist.ProcessGroup) -> bool:
        deadline_s = self._clock() + self._timeout_s
        while True:
            verdict = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._settle_failure(call_idx, verdict, group)
            if verdict is not None and verdict.is_done:
                self._agreement.clear()
                self._calls.pop(call_idx, None)
                return True
            left_s = max(0.0, deadline_s - self._clock())
            outcome = self._outcome_of(call_idx, min(_SLICE_S, left_s) if blocking else 0.0)
            if outcome is None and blocking and not left_s:
                outcome = self._timed_out(call_idx)
            self._agreement.begin(group, call_idx, outcome)
            if not blocking:
                return False

    def _settle_failure(self, call_idx: int, verdict: CallVerdict, group: dist.ProcessGroup) -> NoReturn:
        """Drop a call that all ranks know has failed, and raise its error."""
        self._agreement.clear()
        call = self._calls.pop(call_idx, _Call())
        raise self._agreement.failure(group, verdict, call_idx, call.outcome, call.was_told)

    def _drop_failed(self, call_idx: int, outcome: CallOutcome) -> NoReturn:
        call = self._calls.pop(call_idx, _Call())
        raise failed_call(call_idx, own_rank(), outcome.reason, was_told=call.was_told) from outcome.error

    def _timed_out(self, call_idx: int) -> CallOutcome:
        log.warning(
            "asynchronous checkpoint call %d is not done after %g s; ending its worker", call_idx, self._timeout_s
        )
        self._give_up(call_idx)
        outcome = CallOutcome(f"it was not done within {self._timeout_s:g} s (timeout_s), and its worker was given up")
        if call_idx in self._calls:
            self._calls[call_idx].outcome = outcome
        return outcome

    def _outcome_of(self, call_idx: int, timeout_s: float) -> CallOutcome | None:
        call = self._calls.get(call_idx)
        if call is None:
            return CallOutcome("the queue was closed while it was waited for")
        was_known = call.outcome is not None
        outcome = call.wait(timeout_s)
        if outcome is not None and not outcome.has_failed and not was_known:
            publish_stage("write", call_idx, outcome.duration_s)
        return outcome


def settle(future: Future[T], result: T) -> None:
    """Tell whoever waits for it, unless that was done or nobody asks any more."""
    with suppress(InvalidStateError):
        future.set_result(result)


def as_schedule_error(call_idx: int, outcome: CallOutcome) -> AsyncCheckpointError:
    """The error of `schedule_async_call` for a call that failed before it was through."""
    error = failed_call(call_idx, own_rank(), outcome.reason)
    error.__cause__ = outcome.error
    return error
