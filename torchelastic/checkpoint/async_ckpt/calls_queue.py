"""The queue of asynchronous calls: schedule, go on training, finalise when all ranks are done."""

from __future__ import annotations

import logging
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from torchelastic.checkpoint.async_ckpt.agreement import DEFAULT_TIMEOUT_S
from torchelastic.checkpoint.async_ckpt.caller import AsyncCaller, ThreadAsyncCaller, timed_stage
from torchelastic.checkpoint.async_ckpt.errors import AsyncCheckpointError
from torchelastic.checkpoint.async_ckpt.process_callers import (
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    end_spare,
    warm_up,
)
from torchelastic.checkpoint.async_ckpt.worker_process import WorkerSettings

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)

Worker = Literal["thread", "process", "persistent"]

_live_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()


class AsyncCallsQueue:
    """Runs requests in the background and finalises them on the trainer, oldest first, once all ranks have done them.

    Where a process group of several ranks is initialised, every rank makes a queue and calls its methods in step, on
    the thread that issues its other collectives: `maybe_finalize_async_calls` and `close` are collectives (not with
    `no_dist`). Between them the group may be destroyed and formed anew.

    A call that fails on any rank is finalised on none. Every rank then gets one `AsyncCheckpointError`, from the next
    method at which they can know of it together: `maybe_finalize_async_calls`, `close`, or `schedule_async_request`
    (which then has scheduled nothing). The queue can be used on after it.

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
    ) -> None:
        worker = worker or ("persistent" if persistent else "process")
        if worker not in ("thread", "process", "persistent"):
            raise ValueError(f'worker is {worker!r}: give "thread", "process" or "persistent"')
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds, more than 0")
        self._pid = os.getpid()
        self._last_idx = 0
        self._requests: dict[int, AsyncRequest] = {}
        self._caller: AsyncCaller
        if worker == "thread":
            if io_priority is not None or cpu_shm_mode:
                raise ValueError("io_priority and cpu_shm_mode are for worker processes: leave them out for a thread")
            self._caller = ThreadAsyncCaller(
                cpu_priority=cpu_priority, process_group=process_group, timeout_s=timeout_s
            )
        else:
            of_processes = PersistentAsyncCaller if worker == "persistent" else TemporalAsyncCaller
            self._caller = of_processes(
                is_daemon=is_daemon,
                cpu_priority=cpu_priority,
                io_priority=io_priority,
                sigterm_timeout=sigterm_timeout,
                cpu_shm_mode=cpu_shm_mode,
                process_group=process_group,
                timeout_s=timeout_s,
            )
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
        try:
            self._caller.raise_earlier_failure()
        except AsyncCheckpointError as error:
            self._drop_and_raise_unless_told(error)
        self._last_idx += 1
        request = async_request.freeze()._replace(call_idx=self._last_idx)
        self._requests[request.call_idx] = request
        try:
            with timed_stage("schedule", request.call_idx):
                self._caller.schedule_async_call(request)
        except BaseException:
            if not self._caller.knows(request.call_idx):
                del self._requests[request.call_idx]
            raise
        # the work is the caller's now: its tensors must not live on here until the call is finalised
        self._requests[request.call_idx] = request._replace(
            async_fn=None, async_fn_args=(), async_fn_kwargs=None, preload_fn=None
        )
        return request.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalise, oldest first, the calls that are done on all ranks; their finalize functions run here and now.

        Every rank calls this in step (not with `no_dist`). A poll that does not block waits for no work. Among several
        ranks it is one small all-reduce, begun in one poll and read in the next, so that the ranks need not wait for
        each other; a call is finalised one poll after it is done everywhere, in the same poll on all ranks. Nothing is
        sent while there is no unfinalised call.

        Args:
            blocking: wait until all calls are done; a call that takes longer than `timeout_s` has failed.
            no_dist: look at this rank's work only.

        Returns:
            The indexes of the calls that were finalised.

        Raises:
            AsyncCheckpointError: a call failed on some rank (it is dropped); its `finalized_calls` are those that were
                finalised before. Or the ranks are not in step; then it names those that are not.
            RuntimeError: the process group is broken.
            BaseException: what a finalize function raised; its call counts as finalised.
        """
        finalized: list[int] = []
        while self._requests:
            try:
                if not self._caller.is_current_async_call_done(blocking, no_dist):
                    break
            except AsyncCheckpointError as error:
                error.finalized_calls = tuple(finalized)
                self._drop_and_raise_unless_told(error)
                break  # here and now the other ranks raise, so this one must ask nothing more either
            if not self._requests:
                break  # aborted from another thread
            call_idx = next(iter(self._requests))
            request = self._requests.pop(call_idx)
            with timed_stage("finalize", call_idx):
                request.execute_finalize_fns(validate_matching_call_idx=False)  # the poll has compared the indexes
            finalized.append(call_idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many calls are scheduled, and neither finalised nor reported as failed."""
        return len(self._requests)

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
            while self._requests and not abort:
                try:
                    self.maybe_finalize_async_calls(blocking=True, no_dist=self._caller.acts_alone)
                except AsyncCheckpointError as error:
                    if first_error is not None:
                        log.error("%s", error)
                    first_error = first_error or error
                    if error.rank is None:
                        break  # the ranks are not in step: there is no agreeing on anything
        finally:
            if self._requests:
                log.warning("%d checkpoint calls are dropped without being finalised", len(self._requests))
            self._caller.close(abort=abort or bool(self._requests))
            self._requests.clear()
        if first_error is not None:
            raise first_error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(abort=error is not None)

    def __del__(self) -> None:
        # no collectives and no waiting here: the callers' workers end with them
        if getattr(self, "_requests", None) and self._pid == os.getpid():
            log.warning("a queue with %d unfinalised checkpoint calls was forgotten: call close()", len(self._requests))

    def _drop_and_raise_unless_told(self, error: AsyncCheckpointError) -> None:
        if error.rank is not None and error.call_idx is not None:
            self._requests.pop(error.call_idx, None)
        if not error.was_told:
            raise error


def abort_checkpoints() -> None:
    """Close every live queue of this process with abort, and end a worker that was warmed up; from any thread.

    For whoever must get rid of all background work now, for example before the process restarts its training.
    """
    for queue in list(_live_queues):
        queue.close(abort=True)
    end_spare()
