"""Runs calls in a thread of the trainer. Nothing is copied: who schedules has taken the snapshot."""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torchelastic.checkpoint.async_ckpt.agreement import DEFAULT_TIMEOUT_S
from torchelastic.checkpoint.async_ckpt.caller import AsyncCaller, settle
from torchelastic.checkpoint.async_ckpt.outcome import CallOutcome, failure_of
from torchelastic.checkpoint.async_ckpt.priority import check_priorities, lower_thread_priority

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest

log = logging.getLogger(__name__)


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
        self._worker: _Worker | None = None

    def _start(self, request: AsyncRequest, timeout_s: float) -> Future[CallOutcome]:  # noqa: ARG002 - it waits for no other
        staged = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
        if self._worker is None:
            self._worker = _Worker(self._cpu_priority)
        return self._worker.submit(staged)

    def _give_up(self, call_idx: int) -> None:  # noqa: ARG002 - one thread does all calls
        self._end(abort=True)

    def _end(self, abort: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.stop(drop=abort)
        if abort and worker.is_busy:
            log.warning("a checkpoint thread is still at work; it is not waited for, and its work is not finalised")

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop(drop=True)


class _Worker:
    """A daemon thread and its box of requests. It holds no reference to its caller, so a forgotten one goes away.

    The threads of a `ThreadPoolExecutor` are no daemons: one that hangs would keep the interpreter from ending.
    """

    def __init__(self, cpu_priority: int) -> None:
        self._inbox: queue.SimpleQueue[tuple[AsyncRequest, Future[CallOutcome]] | None] = queue.SimpleQueue()
        self._futures: list[Future[CallOutcome]] = []
        self.is_busy = False
        threading.Thread(target=self._run, args=(cpu_priority,), name="async-checkpoint", daemon=True).start()

    def submit(self, request: AsyncRequest) -> Future[CallOutcome]:
        future: Future[CallOutcome] = Future()
        self._futures = [*(one for one in self._futures if not one.done()), future]
        self._inbox.put((request, future))
        return future

    def stop(self, drop: bool) -> None:
        """Have the thread end after what it was given; if `drop`, after what it is at, and whoever waits is told so."""
        if drop:
            for future in self._futures:
                future.cancel()
        self._inbox.put(None)

    def _run(self, cpu_priority: int) -> None:
        lower_thread_priority(cpu_priority)
        while (job := self._inbox.get()) is not None:
            if not job[1].cancelled():
                self.is_busy = True
                outcome = _outcome_of(job[0])
                self.is_busy = False
                settle(job[1], outcome)
            del job  # its tensors must not outlive it while the thread waits for the next one


def _outcome_of(request: AsyncRequest) -> CallOutcome:
    start_s = time.monotonic()
    try:
        request.work()
    except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread, and nobody would hear of it
        return failure_of(error, time.monotonic() - start_s)
    return CallOutcome(duration_s=time.monotonic() - start_s)
