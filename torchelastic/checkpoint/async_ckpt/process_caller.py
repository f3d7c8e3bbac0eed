"""What callers with worker processes have in common: requests are copied out of the trainer and sent."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torchelastic.checkpoint.async_ckpt.agreement import DEFAULT_TIMEOUT_S
from torchelastic.checkpoint.async_ckpt.caller import AsyncCaller, as_schedule_error
from torchelastic.checkpoint.async_ckpt.memory import MemoryPool, SharedMemory
from torchelastic.checkpoint.async_ckpt.outcome import Outcome
from torchelastic.checkpoint.async_ckpt.shipping import pack
from torchelastic.checkpoint.async_ckpt.stages import timed_stage
from torchelastic.checkpoint.async_ckpt.worker_process import WorkerProcess, WorkerSettings, end_all

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest


class ProcessAsyncCaller(AsyncCaller):
    """Sends requests to worker processes. When a request is scheduled, its tensors have been copied.

    Args:
        is_daemon: a worker may have no child processes of its own (as `multiprocessing.Process` has it).
        cpu_priority: nice value of the workers, -20 to 19.
        io_priority: ionice class of the workers (Linux): 1 real-time, 2 best effort, 3 idle; None changes nothing.
        sigterm_timeout: when workers are ended, seconds from SIGTERM to SIGKILL.
        cpu_shm_mode: keep the shared memory of one call for the next one.
        process_group: see `AsyncCaller`.
        timeout_s: see `AsyncCaller`.
    """

    def __init__(
        self,
        *,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(process_group=process_group, timeout_s=timeout_s)
        self._settings = WorkerSettings(is_daemon, cpu_priority, io_priority, sigterm_timeout)
        self._pool = MemoryPool(reuse=cpu_shm_mode)
        self._memory_of: dict[int, SharedMemory] = {}
        self._worker_of: dict[int, WorkerProcess] = {}

    @abstractmethod
    def _worker(self) -> WorkerProcess:
        """The process for the next request."""

    @abstractmethod
    def _sent(self, worker: WorkerProcess) -> None:
        """The worker was sent its request."""

    def _start(self, request: AsyncRequest, timeout_s: float) -> None:
        with timed_stage("copy", request.call_idx):
            parcel = pack(request, self._pool)
        worker = self._worker()
        self._worker_of[request.call_idx] = worker
        if parcel.memory is not None and self._pool.reuse:  # else the worker holds it last, and has the work of freeing
            self._memory_of[request.call_idx] = parcel.memory
        worker.submit(parcel)
        del parcel
        self._sent(worker)
        if request.preload_fn is not None:
            failure = worker.wait_until_staged(request.call_idx, timeout_s)
            if failure is not None:
                if worker.is_alive and failure.error is None:
                    end_all([worker])  # it hangs
                self._release(request.call_idx)
                raise as_schedule_error(request.call_idx, failure)

    def _wait(self, call_idx: int, timeout_s: float) -> Outcome | None:
        worker = self._worker_of.get(call_idx)
        outcome = self._ended(worker, call_idx, timeout_s) if worker is not None else Outcome("the queue was closed")
        if outcome is not None:
            self._release(call_idx)
        return outcome

    def _ended(self, worker: WorkerProcess, call_idx: int, timeout_s: float) -> Outcome | None:
        return worker.wait_for_end(call_idx, timeout_s)

    def _give_up(self, call_idx: int) -> None:
        worker = self._worker_of.get(call_idx)
        if worker is not None:
            end_all([worker])
        self._release(call_idx)

    def _release(self, call_idx: int) -> None:
        """Nobody works on this call any more."""
        worker = self._worker_of.pop(call_idx, None)
        if worker is not None:
            worker.forget(call_idx)
        memory = self._memory_of.pop(call_idx, None)
        if memory is not None:
            self._pool.give_back(memory)

    def _forget_all(self) -> None:
        for call_idx in list(self._worker_of):
            self._release(call_idx)
