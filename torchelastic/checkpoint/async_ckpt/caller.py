"""What runs the work of calls in the background: a thread here, processes in `process_callers.py`."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError  # noqa: A004 - the builtin one from Python 3.11 on
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from torchelastic.checkpoint.async_ckpt.agreement import (
    DEFAULT_TIMEOUT_S,
    CallAgreement,
    CallVerdict,
    group_in_use,
    own_rank,
)
from torchelastic.checkpoint.async_ckpt.errors import describe, failed_call
from torchelastic.checkpoint.async_ckpt.executors import (
    DaemonExecutor,
    check_priorities,
    failed,
    failure_of,
    lower_priority,
)
from torchelastic.metrics import publish_metric

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)

#: In a blocking wait the ranks ask each other at least so often, so that nobody waits long in a collective.
_SLICE_S = 1.0


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
        self._calls: dict[int, Future[float]] = {}  # the work of those of which nobody was told the end
        self._told: set[int] = set()  # those for which schedule raised; the other ranks may not know
        self._acts_alone = False

    @abstractmethod
    def _start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:
        """Hand the request to a worker; waits for its `preload_fn`, if it has one, but no longer than `timeout_s`.

        Returns:
            How many seconds it took, once it has ended; a worker's death is an end. It may be cancelled: then nobody
            asks any more.
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
        call_idx = request.call_idx
        self._calls[call_idx] = Future()
        try:
            request.check()
            if request.async_fn is None:
                self._calls[call_idx].set_result(0.0)
            else:
                self._calls[call_idx] = self._start(request, self._timeout_s)
        except BaseException as error:
            if self._group() is None or self._acts_alone:
                self._calls.pop(call_idx, None)
            else:  # the others have scheduled it, and hear at their next poll that it failed here
                self._calls[call_idx] = failed(error)
                self._told.add(call_idx)
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
            for call_idx, work in list(self._calls.items()):
                if work.done() and failure_of(work) is not None:
                    self._drop(call_idx, work)
        elif self._calls:
            call_idx = next(iter(self._calls))
            verdict = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._drop_failed(call_idx, verdict.failing_rank, group)

    def close(self, abort: bool = False) -> None:
        """End the workers, in bounded time. No collectives.

        Args:
            abort: at once, and forget all calls: SIGTERM, and SIGKILL after `sigterm_timeout`.
        """
        self._end(abort)
        for work in self._calls.values():
            work.cancel()  # another thread may wait for it
        self._calls.clear()
        self._told.clear()
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
        work = self._waited_for(call_idx, self._timeout_s if blocking else 0.0)
        if blocking and not work.done():
            work = self._timed_out(call_idx)
        if work.done():
            self._drop(call_idx, work)
        return work.done()

    def _is_done(self, call_idx: int, blocking: bool, group: dist.ProcessGroup) -> bool:
        deadline_s = self._clock() + self._timeout_s
        while True:
            verdict: CallVerdict | None = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._drop_failed(call_idx, verdict.failing_rank, group)
            if verdict is not None and verdict.is_done:
                self._agreement.clear()
                self._drop(call_idx, self._waited_for(call_idx, 0.0))
                return True
            left_s = max(0.0, deadline_s - self._clock())
            work = self._waited_for(call_idx, min(_SLICE_S, left_s) if blocking else 0.0)
            if blocking and not left_s and not work.done():
                work = self._timed_out(call_idx)
            self._agreement.begin(group, call_idx, work)
            if not blocking:
                return False

    def _waited_for(self, call_idx: int, timeout_s: float) -> Future[float]:
        """The work of a call, which may have ended within so many seconds."""
        work = self._calls.get(call_idx)
        if work is None:
            return failed(CancelledError("the queue was closed while it was waited for"))
        with suppress(TimeoutError, CancelledError):
            work.exception(timeout_s)
        return work

    def _timed_out(self, call_idx: int) -> Future[float]:
        log.warning(
            "asynchronous checkpoint call %d is not done after %g s; ending its worker", call_idx, self._timeout_s
        )
        self._give_up(call_idx)
        reason = f"it was not done within {self._timeout_s:g} s (timeout_s), and its worker was given up"
        work = failed(TimeoutError(reason))
        if call_idx in self._calls:
            self._calls[call_idx] = work
        return work

    def _drop(self, call_idx: int, ended: Future[float]) -> None:
        """Forget a call whose work has ended here, and raise its error if it has failed."""
        self._calls.pop(call_idx, None)
        error = failure_of(ended)
        if error is not None:
            raise failed_call(call_idx, own_rank(), describe(error), was_told=call_idx in self._told) from error
        if ended.result():  # else there was nothing to do
            publish_stage("write", call_idx, ended.result())

    def _drop_failed(self, call_idx: int, failing_rank: int, group: dist.ProcessGroup) -> NoReturn:
        """Forget a call that all ranks know has failed, and raise its error."""
        self._agreement.clear()
        work = self._calls.pop(call_idx, Future())
        raise self._agreement.failure(group, failing_rank, call_idx, work, call_idx in self._told)


class ThreadAsyncCaller(AsyncCaller):
    """Runs the work of calls in one daemon thread, oldest first, started at the first call.

    A request's arguments are passed as they are, so they must be a snapshot that nobody changes. `preload_fn` runs on
    the calling thread. A thread cannot be killed: work that was given up or aborted ends by itself, and is never
    finalised.

    Args:
        cpu_priority: nice value of the thread (Linux), -20 to 19.
        process_group: see `AsyncCaller`.
        timeout_s: see `AsyncCaller`.
    """

    def __init__(
        self,
        *,
        cpu_priority: int = 10,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        check_priorities(cpu_priority, None)
        super().__init__(process_group=process_group, timeout_s=timeout_s)
        self._cpu_priority = cpu_priority
        self._thread: DaemonExecutor | None = None

    def _start(self, request: AsyncRequest, timeout_s: float) -> Future[float]:  # noqa: ARG002 - it waits for no other
        staged = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
        if self._thread is None:
            self._thread = DaemonExecutor("async-checkpoint", partial(lower_priority, self._cpu_priority))
        return self._thread.submit(staged.work)

    def _give_up(self, call_idx: int) -> None:  # noqa: ARG002 - one thread does all calls
        self._end(abort=True)

    def _end(self, abort: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.shutdown(cancel_futures=abort)
        if abort and not all(work.done() for work in self._calls.values()):
            log.warning("a checkpoint thread is still at work; it is not waited for, and its work is not finalised")

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.shutdown(cancel_futures=True)


def publish_stage(stage: Literal["schedule", "copy", "write", "finalize"], call_idx: int, duration_s: float) -> None:
    """Publish `checkpoint.async.<stage>.duration.ms` in group torchelastic, and log it at debug level."""
    duration_ms = duration_s * 1000.0
    publish_metric("torchelastic", f"checkpoint.async.{stage}.duration.ms", duration_ms)
    log.debug("asynchronous checkpoint call %d: %s took %.1f ms", call_idx, stage, duration_ms)


@contextmanager
def timed_stage(stage: Literal["schedule", "copy", "finalize"], call_idx: int) -> Iterator[None]:
    """Time what is inside; nothing is published if it raises."""
    start_s = time.monotonic()
    yield
    publish_stage(stage, call_idx, time.monotonic() - start_s)
