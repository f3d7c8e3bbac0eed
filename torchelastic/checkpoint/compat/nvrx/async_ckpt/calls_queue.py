"""The queue of asynchronous calls: schedule, go on training, finalise when all ranks are done."""

from __future__ import annotations

import logging
import os
import time
import weakref
from concurrent.futures import CancelledError, Future, TimeoutError  # noqa: A004 - the builtin one from Python 3.11 on
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from torchelastic.checkpoint.compat.nvrx.async_ckpt.call_agreement import (
    DEFAULT_TIMEOUT_S,
    CallAgreement,
    failure_of,
    group_in_use,
    own_rank,
)
from torchelastic.checkpoint.compat.nvrx.async_ckpt.executors import (
    ThreadWorkers,
    Workers,
    failed,
    publish_stage,
    timed_stage,
)
from torchelastic.checkpoint.compat.nvrx.async_ckpt.failed_call import AsyncCheckpointError, describe, failed_call
from torchelastic.checkpoint.compat.nvrx.async_ckpt.worker_process import (
    START_TIMEOUT_S,
    ProcessWorkers,
    WorkerSettings,
    end_spare,
    warm_up,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)

Worker = Literal["thread", "process", "persistent"]

#: In a blocking wait the ranks ask each other at least so often, so that nobody waits long in a collective.
_SLICE_S = 1.0

_live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()


@dataclass
class _ScheduledCall:
    """A call whose end is not reported yet.

    Attributes:
        request: what was scheduled, without the work once that is the worker's.
        work: of this rank.
        since_s: monotonic; when it was scheduled.
        was_told: `schedule` has raised for it, which the other ranks may not know.
        is_overdue: a warning has said that it takes long.
        start_s: another rank may be held in `schedule` for so long until its worker is ready.
    """

    request: AsyncRequest
    work: Future[float]
    since_s: float
    start_s: float
    was_told: bool = False
    is_overdue: bool = False


class AsyncCallsQueue:
    """Runs requests in the background and finalises them on the trainer, oldest first, once all ranks have done them.

    Where a process group of several ranks is initialised, every rank makes a queue and calls its methods in step, on
    the thread that issues its other collectives: `maybe_finalize_async_calls` and `close` are collectives (not with
    `no_dist`). Between them the same ranks may destroy the group and form it anew.

    A call that fails on any rank is finalised on none. Every rank then gets one `AsyncCheckpointError`, from the next
    method at which they can know of it together: `maybe_finalize_async_calls`, `close`, or `schedule_async_request`
    (which then has scheduled nothing: give it the request again). The queue can be used on after it: the part of that
    call that still runs on other ranks is given up, and holds up no later call. A worker process is ended for that; a
    thread cannot be, so it is left behind, and another one does the calls after it.

    As a context manager it closes at the end of the block, with abort if the block raised.

    Args:
        persistent: without `worker`: one process for all calls, else one for each.
        is_daemon: worker processes may have no child processes of their own.
        cpu_priority: nice value of the workers, -20 to 19; a worker never runs at a lower one than the trainer.
        io_priority: ionice class of worker processes (Linux): 1 real-time, 2 best effort, 3 idle; None: unchanged.
        sigterm_timeout: when worker processes are ended, seconds from SIGTERM to SIGKILL.
        cpu_shm_mode: keep the shared memory into which tensors are copied for the next call. A function in the worker
            must not hold on to its tensors then.
        worker: "thread": a thread of this process; nothing is copied, so arguments have to be a snapshot that nobody
            changes. "process", "persistent": spawned processes; tensors are copied to shared memory before
            `schedule_async_request` returns (those of a GPU arrive as CPU tensors), all else is pickled.
        process_group: whose ranks act together; None: the default one, as it is at each call.
        timeout_s: for how many seconds a blocking call waits for the work, and any call for a rank that does not come.
            The start of a worker process is no part of it.
        start_timeout_s: for how many seconds a worker process may import the main module and torch before it takes its
            first call; then it is killed, and the call has failed. A rank that may be held in `schedule_async_request`
            by that, because of a `preload_fn`, is waited for as much longer.

    Raises:
        ValueError: an argument is out of its range, or does not go with a thread.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        worker: Worker | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        worker = worker or ("persistent" if persistent else "process")
        if worker not in ("thread", "process", "persistent"):
            raise ValueError(f'worker is {worker!r}: give "thread", "process" or "persistent"')
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds, more than 0")
        self._pid = os.getpid()
        self._last_idx = 0
        self._workers: Workers
        if worker == "thread":
            if io_priority is not None or cpu_shm_mode:
                raise ValueError("io_priority and cpu_shm_mode are for worker processes: leave them out for a thread")
            self._workers = ThreadWorkers(cpu_priority)
            self._start_timeout_s = 0.0
        else:
            settings = WorkerSettings(is_daemon, cpu_priority, io_priority, sigterm_timeout, start_timeout_s)
            self._start_timeout_s = start_timeout_s
            self._workers = ProcessWorkers(settings, once=worker == "process", reuse_memory=cpu_shm_mode)
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._agreement = CallAgreement(timeout_s)
        self._calls: dict[int, _ScheduledCall] = {}
        self._acts_alone = False  # whether the last poll asked this rank only
        _live_queues.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start a persistent worker ahead of the first call, which else begins with some seconds of imports.

        The first queue of this process that needs a worker with the same settings takes it. Not a collective.

        Args:
            rank: for the log.
            is_daemon: as for the queue; so are the others.
            cpu_priority: ...
            io_priority: ...
            sigterm_timeout: ...
            cpu_shm_mode: makes no difference to the worker.

        Raises:
            ValueError: an argument is out of its range.
        """
        del cpu_shm_mode
        pid = warm_up(WorkerSettings(is_daemon, cpu_priority, io_priority, sigterm_timeout))
        log.info("rank %d: a checkpoint worker is ready to come, process %d", rank, pid)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin the work of a request in the background; every rank schedules the same requests in the same order.

        Not a collective of its own, but every rank calls it in step: it reads what the last poll has found.

        Args:
            async_request: what to do. Its tensors may be changed as soon as this returns (not with a thread). With a
                `preload_fn`, this waits until that is through, at most `timeout_s`.

        Returns:
            The index of the call, from 1.

        Raises:
            AsyncCheckpointError: an earlier call failed, and nothing was scheduled; or `preload_fn` failed in the
                worker.
            TypeError: the request cannot be pickled for a worker process.
            ValueError: there is a `preload_fn` and no argument for its result.
            BaseException: with a thread, what `preload_fn` raised.
        """
        self._raise_earlier_failure()
        self._last_idx += 1
        with timed_stage("schedule", self._last_idx):
            self._schedule(async_request.freeze()._replace(call_idx=self._last_idx))
        return self._last_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalise, oldest first, the calls that are done on all ranks; their finalize functions run here and now.

        Every rank calls this in step (not with `no_dist`). A poll that does not block waits for no work. Among several
        ranks it is one small all-reduce, begun in one poll and read in the next, so that the ranks need not wait for
        each other; a call is finalised one poll after it is done everywhere, in the same poll on all ranks. Nothing is
        sent while there is no unfinalised call.

        Args:
            blocking: wait until all calls are done; a call that takes longer than `timeout_s` has failed.
            no_dist: look at this rank's work only, and wait for no other rank: a local checkpoint is then made to count
                by the next save of its manager.

        Returns:
            The indexes of the calls that were finalised.

        Raises:
            AsyncCheckpointError: a call failed on some rank (it is dropped); its `finalized_calls` are those that were
                finalised before. Or the ranks are not in step; then it names those that are not.
            RuntimeError: the process group is broken.
            BaseException: what a finalize function raised; its call counts as finalised.
        """
        finalized: list[int] = []
        try:
            while (request := self._take_done(blocking, no_dist)) is not None:
                with timed_stage("finalize", request.call_idx):
                    # the poll has compared the indexes
                    request.execute_finalize_fns(validate_matching_call_idx=False, alone=no_dist)
                finalized.append(request.call_idx)
        except AsyncCheckpointError as error:
            error.finalized_calls = tuple(finalized)
            raise
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many calls are scheduled, and neither finalised nor reported as failed."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalise everything and end the workers, in bounded time. The next request would start one anew.

        Every rank calls this in step, unless it aborts or has nothing to finalise.

        Args:
            abort: finalise nothing and drop what is not finalised; end the workers at once, by SIGTERM and after
                `sigterm_timeout` by SIGKILL. No collectives; may be called from any thread.

        Raises:
            AsyncCheckpointError: as `maybe_finalize_async_calls`, for the first call that failed; others are logged.
                The workers are ended all the same.
        """
        first_error: AsyncCheckpointError | None = None
        try:
            while self._calls and not abort:
                try:
                    self.maybe_finalize_async_calls(blocking=True, no_dist=self._acts_alone)
                except AsyncCheckpointError as error:
                    if first_error is not None:
                        log.error("%s", error)
                    first_error = first_error or error
                    if error.rank is None:
                        break  # the ranks are not in step: there is no agreeing on anything
        finally:
            if self._calls:
                log.warning("%d checkpoint calls are aborted without being finalised", len(self._calls))
            self._workers.end(abort or bool(self._calls))
            for call in self._calls.values():
                call.work.cancel()  # another thread may wait for it
            self._calls.clear()
            self._agreement.clear()
        if first_error is not None:
            raise first_error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(abort=error is not None)

    def __del__(self) -> None:
        # no collectives and no waiting here: the workers end with what has started them
        if getattr(self, "_calls", None) and self._pid == os.getpid():
            log.warning("a queue with %d unfinalised checkpoint calls was forgotten: call close()", len(self._calls))

    def _schedule(self, request: AsyncRequest) -> None:
        start_s = self._start_timeout_s if request.preload_fn is not None else 0.0
        call = self._calls[request.call_idx] = _ScheduledCall(request, Future(), time.monotonic(), start_s)
        try:
            request.check()
            if request.async_fn is None:
                call.work.set_result(0.0)
            else:
                call.work = self._workers.start(request, self._timeout_s)
        except BaseException as error:
            if self._group() is None or self._acts_alone:
                self._calls.pop(request.call_idx, None)
                request.take_back()
            else:  # the others have scheduled it, and hear at their next poll that it failed here
                call.work, call.was_told = failed(error), True
            raise
        finally:  # the work is the worker's now: its tensors must not live on here until the call is finalised
            call.request = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs=None, preload_fn=None)

    def _take_done(self, blocking: bool, no_dist: bool) -> AsyncRequest | None:
        """Forget the oldest call and return it, if its work is done on all ranks; else None, as if there is none.

        Among several ranks, a poll that does not block tells what they said in the poll before.

        Raises:
            AsyncCheckpointError: the oldest call failed somewhere (it is dropped, so the next one is the oldest), or
                the ranks are not in step. Where `_schedule` has raised for that call on this rank, this returns None.
        """
        self._acts_alone = no_dist
        if not self._calls:
            return None
        call_idx = next(iter(self._calls))
        group = None if no_dist else self._group()
        return self._taken_here(call_idx, blocking) if group is None else self._taken(call_idx, blocking, group)

    def _raise_earlier_failure(self) -> None:
        """Raise the failure of a call that is known of without asking anybody, and on all ranks alike; else do nothing.

        Among several ranks that is what they said in their last poll. The call is dropped.
        """
        group = None if self._acts_alone else self._group()
        if group is None:
            for call_idx, call in list(self._calls.items()):
                if call.work.done() and failure_of(call.work) is not None:
                    self._pop_ended(call_idx, call.work)
        elif self._calls:
            call_idx = next(iter(self._calls))
            verdict = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._pop_failed(call_idx, verdict.failing_rank, group)

    def _group(self) -> dist.ProcessGroup | None:
        return group_in_use(self._process_group)

    def _taken_here(self, call_idx: int, blocking: bool) -> AsyncRequest | None:
        deadline_s = time.monotonic() + self._timeout_s
        work, deadline_s = self._wait_a_slice(call_idx, deadline_s, blocking)
        while blocking and not work.done():
            work, deadline_s = self._wait_a_slice(call_idx, deadline_s, blocking)
        self._warn_if_overdue(call_idx)
        return self._pop_ended(call_idx, work) if work.done() else None

    def _taken(self, call_idx: int, blocking: bool, group: dist.ProcessGroup) -> AsyncRequest | None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            verdict = self._agreement.read(group, call_idx)
            if verdict is not None and verdict.failing_rank is not None:
                self._pop_failed(call_idx, verdict.failing_rank, group)
                return None
            if verdict is not None and verdict.is_done:
                self._agreement.clear()
                return self._pop_ended(call_idx, self._waited_for(call_idx, 0.0))
            work, deadline_s = self._wait_a_slice(call_idx, deadline_s, blocking)
            call = self._calls.get(call_idx)
            self._agreement.begin(group, call_idx, work, call.start_s if call is not None else 0.0)
            if not blocking:
                self._warn_if_overdue(call_idx)
                return None

    def _wait_a_slice(self, call_idx: int, deadline_s: float, blocking: bool) -> tuple[Future[float], float]:
        """The work of a call after a part of a blocking wait, failed at the deadline; and the deadline, which moves."""
        now_s = time.monotonic()
        if self._workers.is_starting(call_idx):
            deadline_s = now_s + self._timeout_s
        left_s = max(0.0, deadline_s - now_s)
        work = self._waited_for(call_idx, min(_SLICE_S, left_s) if blocking else 0.0)
        if blocking and not left_s and not work.done():
            work = self._timed_out(call_idx)
        return work, deadline_s

    def _waited_for(self, call_idx: int, timeout_s: float) -> Future[float]:
        """The work of a call, which may have ended within so many seconds."""
        call = self._calls.get(call_idx)
        if call is None:
            return failed(CancelledError("the queue was closed while it was waited for"))
        with suppress(TimeoutError, CancelledError):
            call.work.exception(timeout_s)
        return call.work

    def _timed_out(self, call_idx: int) -> Future[float]:
        log.warning(
            "asynchronous checkpoint call %d is not done after %g s; ending its worker", call_idx, self._timeout_s
        )
        self._workers.abort(call_idx)
        reason = f"it was not done within {self._timeout_s:g} s (timeout_s), and its worker was aborted"
        work = failed(TimeoutError(reason))
        if call_idx in self._calls:
            self._calls[call_idx].work = work
        return work

    def _warn_if_overdue(self, call_idx: int) -> None:
        """A poll that does not block waits for no work, and gives none up; but whoever only polls has to know."""
        call = self._calls.get(call_idx)
        if call is None or call.is_overdue or call.work.done() or time.monotonic() - call.since_s < self._timeout_s:
            return
        call.is_overdue = True
        log.warning(
            "asynchronous checkpoint call %d is not done %g s (timeout_s) after it was scheduled, and holds up those "
            "after it: maybe_finalize_async_calls(blocking=True) or close() aborts it if it goes on",
            call_idx,
            self._timeout_s,
        )

    def _pop_ended(self, call_idx: int, ended: Future[float]) -> AsyncRequest | None:
        """Forget a call whose work has ended here, and return it; raise its error if it has failed and was not told."""
        call = self._calls.pop(call_idx, None)
        error = failure_of(ended)
        if error is None:
            if ended.result():  # else there was nothing to do
                publish_stage("write", call_idx, ended.result())
        else:
            if call is not None:
                call.request.take_back()
            if call is None or not call.was_told:
                raise failed_call(call_idx, own_rank(), describe(error)) from error
        return call.request if call is not None and error is None else None

    def _pop_failed(self, call_idx: int, failing_rank: int, group: dist.ProcessGroup) -> None:
        """Forget a call that all ranks know has failed, and raise its error unless it was told."""
        self._agreement.clear()
        call = self._calls.pop(call_idx, None)
        work: Future[float] = call.work if call is not None else Future()
        if not work.done():  # nobody wants it any more, and the next call must not wait behind it
            self._workers.abort(call_idx)
        error = self._agreement.failure(group, failing_rank, call_idx, work)
        if call is not None:
            call.request.take_back()
        if call is None or not call.was_told:
            raise error


def abort_checkpoints() -> None:
    """Close every live queue of this process with abort, and end a worker that was warmed up; from any thread.

    For whoever must get rid of all background work now, for example before the process restarts its training.
    """
    for queue in list(_live_queues):
        queue.close(abort=True)
    end_spare()
