"""Runs calls in a thread of the trainer. Nothing is copied: who schedules has taken the snapshot."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from torchelastic.checkpoint.async_ckpt.agreement import DEFAULT_TIMEOUT_S
from torchelastic.checkpoint.async_ckpt.caller import AsyncCaller
from torchelastic.checkpoint.async_ckpt.outcome import Outcome, failure_of
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
        self._worker_of: dict[int, _Worker] = {}

    def _start(self, request: AsyncRequest, timeout_s: float) -> None:  # noqa: ARG002 - it waits for no other
        staged = request._replace(async_fn_args=request.staged_args(), preload_fn=None)
        if self._worker is None:
            self._worker = _Worker(self._cpu_priority)
        self._worker_of[request.call_idx] = self._worker
        self._worker.submit(staged)

    def _wait(self, call_idx: int, timeout_s: float) -> Outcome | None:
        worker = self._worker_of.get(call_idx)
        outcome = worker.wait(call_idx, timeout_s) if worker is not None else Outcome("the queue was closed")
        if outcome is not None:
            self._worker_of.pop(call_idx, None)
        return outcome

    def _give_up(self, call_idx: int) -> None:  # noqa: ARG002 - one thread does all calls
        self._end(abort=True)

    def _end(self, abort: bool) -> None:
        if self._worker is not None:
            self._worker.stop(drop=abort)
            self._worker = None
        if abort and any(worker.is_busy for worker in self._worker_of.values()):
            log.warning("a checkpoint thread is still at work; it is not waited for, and its work is not finalised")

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop(drop=True)


class _Worker:
    """A daemon thread and its box of requests. It holds no reference to its caller, so a forgotten one goes away."""

    def __init__(self, cpu_priority: int) -> None:
        self._inbox: queue.SimpleQueue[AsyncRequest | None] = queue.SimpleQueue()
        self._outcomes: dict[int, Outcome] = {}
        self._changed = threading.Condition()
        self._is_dropped = False
        self.is_busy = False
        # a daemon, because others would keep the interpreter from ending while they wait for work
        threading.Thread(target=self._run, args=(cpu_priority,), name="async-checkpoint", daemon=True).start()

    def submit(self, request: AsyncRequest) -> None:
        self._inbox.put(request)

    def wait(self, call_idx: int, timeout_s: float) -> Outcome | None:
        with self._changed:
            self._changed.wait_for(lambda: call_idx in self._outcomes or self._is_dropped, timeout_s)
            dropped = Outcome("the thread that had to do it was given up") if self._is_dropped else None
            return self._outcomes.pop(call_idx, dropped)

    def stop(self, drop: bool) -> None:
        """Have the thread end after what it was given; if `drop`, after what it is at, and whoever waits is told so."""
        with self._changed:
            self._is_dropped = drop
            self._changed.notify_all()
        self._inbox.put(None)

    def _run(self, cpu_priority: int) -> None:
        lower_thread_priority(cpu_priority)
        while (request := self._inbox.get()) is not None and not self._is_dropped:
            self.is_busy = True
            outcome = _outcome_of(request)
            self.is_busy = False
            with self._changed:
                self._outcomes[request.call_idx] = outcome
                self._changed.notify_all()
            del request  # its tensors must not outlive it while the thread waits for the next one


def _outcome_of(request: AsyncRequest) -> Outcome:
    start_s = time.monotonic()
    try:
        request.work()
    except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread, and nobody would hear of it
        return failure_of(error, time.monotonic() - start_s)
    return Outcome(duration_s=time.monotonic() - start_s)
