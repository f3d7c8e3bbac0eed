"""What the workers of this host say: line by line to the screen, byte for byte to the files of `--log-dir`.

A disk that is full, gone or silent costs lines of these files, never a worker: it would block on a pipe that nobody
empties. Nor does it hold up the agent, whose signs of life keep the host in the run.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Set
from functools import partial
from pathlib import Path
from typing import IO

from torchelastic.agent.control_sequences import is_prompt, plain_text, without_sequences
from torchelastic.agent.left_output import Pipe
from torchelastic.agent.terminal import Terminal
from torchelastic.log_lines import JSON

log = logging.getLogger(__name__)

_MOST_LINE_BYTES = 2**20
_PIECE_BYTES = 2**16
#: A line that stays unfinished, because somebody has to answer it or because it is written anew, is shown so often.
UNFINISHED_S = 0.1
#: So many bytes may wait for the disk of a worker's file; what comes then is left out.
_MOST_WAITING_BYTES = 4 * 2**20
#: So long does the launcher's end wait for the disk, once for all files.
_EXIT_S = 5.0

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class WorkerLines:
    """Use it on the agent's event loop.

    Args:
        terminal: shows them.
        hidden: (local rank, "stdout" or "stderr") of what it does not show.
    """

    def __init__(self, terminal: Terminal, hidden: Set[tuple[int, str]]) -> None:
        self._terminal, self._hidden = terminal, hidden
        self._unshown: set[tuple[int, str]] = set()
        self._open: dict[asyncio.ReadTransport, tuple[tuple[int, str], IO[bytes]]] = {}

    def let_go(self) -> list[Pipe]:
        """Read no pipe any more, and return those that are open: what a worker has started holds them yet."""
        pipes = []
        for transport, (said, pipe) in self._open.items():
            if not pipe.closed:
                is_shown = said not in self._hidden and self._terminal.form != JSON
                pipes.append(Pipe(os.dup(pipe.fileno()), said[1] if is_shown else ""))
            transport.close()  # what was read by now is shown yet
        return pipes

    async def pass_on(
        self,
        local_rank: int,
        stream: str,
        pipe: IO[bytes],
        file: WorkerLog | None,
        on_line: Callable[[str], None] = lambda _text: None,
        *,
        prompts: bool = False,
    ) -> None:
        """Read a worker's pipe to its end: a worker whose pipe is full blocks.

        Args:
            local_rank: the worker's number on this host.
            stream: "stdout" or "stderr".
            pipe: its end for reading.
            file: takes the bytes, too.
            on_line: called with each line.
            prompts: whether somebody at the terminal may be asked.
        """
        reader = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        said = (local_rank, stream)
        self._open[transport] = said, pipe
        decoder, line = codecs.getincrementaldecoder("utf-8")("replace"), ""
        async for piece in _pieces(reader):
            if file is not None:
                file.write(without_sequences(piece) if self._terminal.is_live else piece)
            line += decoder.decode(piece)
            if line.endswith("\n") or len(line) >= _MOST_LINE_BYTES:
                self._show(self._terminal.said, *said, line.rstrip("\n"))
                on_line(plain_text(line.rstrip("\n")))
                line = ""
            elif prompts and is_prompt(line):
                self._show(self._terminal.asks, *said, line)
                on_line(line)
                line = ""  # the answer ends this line on the screen
            else:
                line = line[line.rstrip("\r").rfind("\r") + 1 :]
                self._show(self._terminal.rewrites, *said, line)
        line += decoder.decode(b"", final=True)
        if line:
            self._show(self._terminal.said, *said, line)
            on_line(plain_text(line))
        del self._open[transport]
        transport.close()

    def _show(self, show: Callable[[int, str, str], None], local_rank: int, stream: str, text: str) -> None:
        if (local_rank, stream) in self._hidden:
            return
        try:
            show(local_rank, stream, text)
        except Exception:  # said once: the next line may do better
            if (local_rank, stream) not in self._unshown:
                self._unshown.add((local_rank, stream))
                log.exception("worker %d: lines of its %s are missing on this screen", local_rank, stream)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line with its end; without one: what is longer than a line may be, the last, and what stays unfinished."""
    rest, since_s = b"", 0.0
    while True:
        left_s = max(0.0, since_s + UNFINISHED_S - time.monotonic()) if rest else None
        try:
            piece = await asyncio.wait_for(reader.read(_PIECE_BYTES), left_s)
        except asyncio.TimeoutError:
            yield rest
            rest = b""
            continue
        since_s = since_s if rest else time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        since_s = time.monotonic() if lines else since_s
        for line in lines:
            yield line + b"\n"
        if rest and (not piece or len(rest) >= _MOST_LINE_BYTES):
            yield rest
            rest = b""
        if not piece:
            return


class WorkerLog:
    """The file of one worker process, written on a thread of its own: its storage may be slow, or not answer.

    All methods are for one thread; none but `join` waits.

    Args:
        opens: makes the file, on that thread, and returns its path and a descriptor for writing; it is closed after
            `close`, when all is written.
        on_failure: called with each error of making it and of writing to it, on that thread.

    Attributes:
        path: the file; None: there is none yet, or none can be made.
    """

    def __init__(self, opens: Callable[[], tuple[Path, int]], on_failure: Callable[[OSError], None]) -> None:
        self.path: Path | None = None
        self._opens, self._on_failure = opens, on_failure
        self._queue: queue.SimpleQueue[bytes | int | None] = queue.SimpleQueue()
        self._is_closed = False
        self._put_bytes = self._skipped_bytes = 0
        # of the thread
        self._descriptor = -1
        self._done_bytes = self._missing_bytes = 0
        self._thread = threading.Thread(target=self._run, name="torchelastic-worker-log", daemon=True)
        self._thread.start()

    def write(self, text: bytes) -> None:
        """Append; raises nothing. What the disk does not take is left out, and the file says how much that was.

        After `close` it does nothing: what a worker has started may outlive it, and still write.
        """
        if self._is_closed:
            return
        if self._put_bytes - self._done_bytes > _MOST_WAITING_BYTES:
            self._skipped_bytes += len(text)
            return
        self._put_skipped()
        self._put_bytes += len(text)
        self._queue.put(text)

    def close(self) -> None:
        """There is no more to write; raises nothing. To be called once."""
        self._is_closed = True
        self._put_skipped()
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until a file that was closed is written; false: it is not, after that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put_skipped(self) -> None:
        if self._skipped_bytes:
            self._queue.put(self._skipped_bytes)
            self._skipped_bytes = 0

    def _run(self) -> None:
        try:
            self.path, self._descriptor = self._opens()
        except OSError as error:
            self._is_closed = True  # nothing is kept for it
            self._on_failure(error)
            return
        while (item := self._queue.get()) is not None:
            if isinstance(item, int):
                self._missing_bytes += item
            else:
                self._append(item)
                self._done_bytes += len(item)
        if self._missing_bytes:
            self._append(b"")  # the disk may have room again for the note
        try:
            os.close(self._descriptor)
        except OSError as error:  # some network file systems report a full disk here
            self._on_failure(error)

    def _append(self, text: bytes) -> None:
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
        self._creating = threading.Lock()  # of all files' threads: one ending for all
        self._files: list[WorkerLog] = []
        atexit.register(self.join, _EXIT_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the disk, at most so long for all files together that are closed. The end of the process does so."""
        until_s = time.monotonic() + timeout_s
        self._files = [file for file in self._files if not file.join(max(0.0, until_s - time.monotonic()))]

    def opened(self, local_rank: int, restarts: int) -> WorkerLog:
        """A new file for a worker process. If there can be none, that is logged, and nothing is written.

        Args:
            local_rank: the worker's number on this host.
            restarts: how often its process has been started again.
        """
        self.join(0.0)  # whose worker has ended is not kept
        self._files.append(WorkerLog(partial(self._made, f"worker_{local_rank}.{restarts}"), self._failed))
        return self._files[-1]

    def _made(self, name: str) -> tuple[Path, int]:
        with self._creating:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._created(name)

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
