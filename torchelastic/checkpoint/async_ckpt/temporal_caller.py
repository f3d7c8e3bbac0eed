"""A process of its own for each call."""

from __future__ import annotations

from torchelastic.checkpoint.async_ckpt.outcome import Outcome
from torchelastic.checkpoint.async_ckpt.process_caller import ProcessAsyncCaller
from torchelastic.checkpoint.async_ckpt.worker_process import WorkerProcess, end_all


class TemporalAsyncCaller(ProcessAsyncCaller):
    """Starts a process for each call, and takes the call for done only if that process ended with exit code 0.

    It is spawned, so each call begins with the import of torch and of the main module. Calls run beside each other.
    """

    def _worker(self) -> WorkerProcess:
        return WorkerProcess(self._settings)

    def _sent(self, worker: WorkerProcess) -> None:
        worker.finish()

    def _ended(self, worker: WorkerProcess, call_idx: int, timeout_s: float) -> Outcome | None:
        deadline_s = self._clock() + timeout_s
        outcome = worker.wait_for_end(call_idx, timeout_s)
        if outcome is None or outcome.has_failed:
            return outcome
        code = worker.wait_for_exit(max(0.0, deadline_s - self._clock()))
        if code is None:
            return None
        return Outcome(f"its worker process {worker.pid} ended with exit code {code}") if code else outcome

    def _end(self, abort: bool) -> None:
        if abort:
            end_all(list(self._worker_of.values()))
        self._forget_all()
