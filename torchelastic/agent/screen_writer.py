"""Writes to the screen on a thread of its own.

A screen that takes nothing (a stopped pager, a full pipe) must hold up neither the agent, whose signs of life keep the
host in the run, nor the workers, whose pipes it empties.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

#: So many characters may wait for a screen that is slow; what comes then is counted and not shown.
MOST_WAITING = 4 * 2**20

#: For the line below: erase it; no colours; and let the terminal cut what is too long, whatever its width is by now.
_ERASE, _PLAIN, _NO_WRAP, _WRAP = "\r\x1b[2K", "\x1b[0m", "\x1b[?7l", "\x1b[?7h"
_REDRAW = ("", "")


class ScreenWriter:
    """Any thread may write; nobody waits but for `close`.

    Args:
        stdout: written to under the name "stdout".
        stderr: written to under the name "stderr", and with what is to be said of lines that were not shown.
        lost: makes the line that says how many lines were not shown.
        most_waiting: so many characters may wait.
        is_terminal: both streams are the same terminal, so that `show_below` works.

    Attributes:
        logged: how often something was written to a `file`.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        lost: Callable[[int], str],
        most_waiting: int = MOST_WAITING,
        *,
        is_terminal: bool = False,
    ) -> None:
        self._streams: dict[str, TextIO | None] = {"stdout": stdout, "stderr": stderr}
        self._is_terminal = is_terminal
        self._below = self._drawn = ""
        self._has_redraw = False
        self.logged = 0
        self._lost, self._most_waiting = lost, most_waiting
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="torchelastic-screen", daemon=True)
        self._thread.start()

    def write(self, stream: str, text: str) -> None:
        """Have a text written, line ends and all.

        Args:
            stream: "stdout" or "stderr".
            text: what to write.
        """
        with self._lock:
            if self._waiting + len(text) > self._most_waiting:
                self._dropped += 1
                return
            self._waiting += len(text)
        self._queue.put((stream, text))

    def show_below(self, line: str) -> None:
        """Show a line below all that is written, in place of the one before, cut to the width; empty: none.

        On a terminal only.
        """
        with self._lock:
            self._below = line
            has_redraw, self._has_redraw = self._has_redraw, True
        if not has_redraw:
            self._queue.put(_REDRAW)

    def file(self, stream: str) -> io.TextIOBase:
        """Something to write to, for a log handler."""
        return _File(self, stream)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, waiting at most so long. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            if item is not _REDRAW:
                self._put(stream, self._over_below(text))
            with self._lock:
                self._has_redraw = self._has_redraw and item is not _REDRAW
                self._waiting -= len(text)
                dropped, is_clear = self._dropped, self._waiting == 0
                if is_clear:
                    self._dropped = 0
            if dropped and is_clear:
                self._put("stderr", self._over_below(self._lost(dropped) + "\n"))
            if self._queue.empty():
                self._draw_below()
        self._put("stderr", self._over_below(""))

    def _over_below(self, text: str) -> str:
        """The text in place of the line below."""
        erase, self._drawn = _ERASE if self._drawn else "", ""
        return erase + text

    def _draw_below(self) -> None:
        below = self._below
        if self._is_terminal and below != self._drawn:
            self._put("stderr", _ERASE + (f"{_NO_WRAP}{below}{_PLAIN}{_WRAP}" if below else ""))
            self._drawn = below

    def _put(self, name: str, text: str) -> None:
        stream = self._streams[name]
        if stream is None:
            return
        try:
            _write(stream, text)
        except (OSError, ValueError):  # whoever read it is gone: the workers go on without a reader
            self._streams[name] = None


def _write(stream: TextIO, text: str) -> None:
    """Past Python's buffers: a thread that hangs in one of those would keep the process from ending."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):
        stream.write(text)
        stream.flush()
        return
    stream.flush()
    view = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while view:
        view = view[os.write(descriptor, view) :]


class _File(io.TextIOBase):
    def __init__(self, writer: ScreenWriter, stream: str) -> None:
        self._writer, self._stream = writer, stream

    def write(self, text: str) -> int:
        self._writer.logged += 1
        self._writer.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):
            super().flush()
