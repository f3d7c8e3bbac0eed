"""The files of `--log-dir`: what each worker process says, byte for byte, for as long as the disk takes it.

A disk that is full or gone costs lines of these files, never a worker: it would block on a pipe that nobody empties.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class WorkerLog:
    """The file of one worker process. One thread at a time.

    Args:
        path: the file.
        descriptor: the file, open for writing; closed by `close`.
        on_failure: called with each error of writing to it.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, descriptor: int, on_failure: Callable[[OSError], None]) -> None:
        self.path = path
        self._descriptor, self._on_failure = descriptor, on_failure
        self._missing_bytes = 0

    def write(self, text: bytes) -> None:
        """Append; raises nothing. What the disk does not take is left out, and the file says how much that was.

        After `close` it does nothing: what a worker has started may outlive it, and still write.
        """
        if self._descriptor < 0:
            return
        note = b""
        if self._missing_bytes:
            note = b"\n[torchelastic: %d bytes could not be written here]\n" % self._missing_bytes
        data, written = memoryview(note + text), 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            self._missing_bytes = 0
        except OSError as error:
            is_noted = written >= len(note)
            self._missing_bytes = len(data) - written if is_noted else self._missing_bytes + len(text)
            self._on_failure(error)

    def close(self) -> None:
        """Close it; raises nothing. To be called once."""
        if self._missing_bytes:
            self.write(b"")  # the disk may have room again for the note
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.close(descriptor)
        except OSError as error:  # some network file systems report a full disk here
            self._on_failure(error)


class WorkerLogs:
    """Opens the files of one agent's workers. Use it on the agent's event loop.

    A file is called `worker_<local rank>.<restart>.log`. Where such a file exists, of another host that shares the
    folder or of an earlier start, it is left alone: this agent's files then end in `.<host>-<id>.log`.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ending = ".log"
        self._has_failed = False

    def opened(self, local_rank: int, restarts: int) -> WorkerLog | None:
        """A new file for a worker process; None: there can be none, which was logged.

        Args:
            local_rank: the worker's number on this host.
            restarts: how often its process has been started again.
        """
        name = f"worker_{local_rank}.{restarts}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path, descriptor = self._created(name)
        except OSError as error:
            self._failed(error)
            return None
        return WorkerLog(path, descriptor, self._failed)

    def _created(self, name: str) -> tuple[Path, int]:
        path = self._folder / f"{name}{self._ending}"
        try:
            return path, os.open(path, _FLAGS, 0o666)
        except FileExistsError:
            if self._ending != ".log":
                raise
        self._ending = f".{socket.gethostname()}-{uuid.uuid4().hex[:8]}.log"
        log.warning(
            "%s exists, of another host or of an earlier start: the workers' output goes to worker_*%s there",
            path, self._ending,
        )  # fmt: skip
        return self._created(name)

    def _failed(self, error: OSError) -> None:
        """Say it once: the next lines would only fill the same disk."""
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "the workers' output cannot be written to --log-dir %s: %s; training goes on, and what its files miss "
                "is on this screen only: free space there, or give another --log-dir with the next start",
                self._folder, error.strerror or error,
            )  # fmt: skip
