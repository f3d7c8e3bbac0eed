"""One process for all calls."""

from __future__ import annotations

import threading

from torchelastic.checkpoint.async_ckpt.process_caller import ProcessAsyncCaller
from torchelastic.checkpoint.async_ckpt.worker_process import WorkerProcess, WorkerSettings, end_all


class PersistentAsyncCaller(ProcessAsyncCaller):
    """Keeps one process, which does the calls one after the other. It is spawned at the first call (or by `warm_up`).

    If it dies, all calls that it was at or had yet to do have failed, and the next call starts another one.
    """

    _current: WorkerProcess | None = None

    def _worker(self) -> WorkerProcess:
        if self._current is None or not self._current.is_alive:
            self._current = _take_spare(self._settings) or WorkerProcess(self._settings)
        return self._current

    def _sent(self, worker: WorkerProcess) -> None:
        """It waits for more."""

    def _end(self, abort: bool) -> None:
        worker, self._current = self._current, None
        if worker is not None and worker.is_alive:
            if not abort:
                worker.finish()
                worker.wait_for_exit(self._settings.sigterm_timeout_s)
            end_all([worker])
        self._forget_all()


class _Spare:
    """The process that was started ahead of the first call, for whoever needs one first."""

    lock = threading.Lock()
    worker: WorkerProcess | None = None


def warm_up(settings: WorkerSettings) -> int:
    """Start a worker process ahead of time, unless one waits already; returns its process id. From any thread."""
    with _Spare.lock:
        if _Spare.worker is None or not _Spare.worker.is_alive or _Spare.worker.settings != settings:
            _Spare.worker = WorkerProcess(settings)  # one that was started otherwise is ended with its last reference
        return _Spare.worker.pid


def end_spare() -> None:
    """End the process that was started ahead, if nobody has taken it."""
    with _Spare.lock:
        worker, _Spare.worker = _Spare.worker, None
    if worker is not None:
        end_all([worker])


def _take_spare(settings: WorkerSettings) -> WorkerProcess | None:
    with _Spare.lock:
        if _Spare.worker is None or _Spare.worker.settings != settings or not _Spare.worker.is_alive:
            return None
        worker, _Spare.worker = _Spare.worker, None
        return worker
