"""Programs in the foreground of a terminal, as a person starts them: a real pseudo-terminal, and what it would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b")
#: A terminal at which nobody has set anything has none of these.
_NOT_SET = ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")


class Shell:
    """A program in the foreground of a terminal of its own.

    Args:
        words: after the interpreter.
        folder: where it runs.
        **variables: of its environment, beside those of this process.
    """

    def __init__(self, *words: str, folder: Path, **variables: str) -> None:
        self.said = ""
        self._exit_code: int | None = None
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_SET}
        environment = {**kept, "TERM": "xterm-256color", **variables}
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                for ignored in (signal.SIGINT, signal.SIGQUIT):  # by a shell that has the tests in its background
                    signal.signal(ignored, signal.SIG_DFL)
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
                os.chdir(folder)
                os.execve(sys.executable, [sys.executable, *words], environment)
            finally:  # there must be no second process that runs tests
                os._exit(127)

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until the terminal was sent a text after what was read before."""
        begin = len(self.said)
        self.until_true(lambda: text in self.said[begin:], repr(text), timeout_s)

    def until_true(self, condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        """Read until something is so."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} in {self.said[-6000:]!r}"
            assert self._read(), f"it ended without {what}: {self.said[-6000:]!r}"

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self, timeout_s: float = 90.0) -> int:
        """Wait for its end; its exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline_s, self.said[-6000:]
        return self._reap()

    def hang_up(self) -> int:
        """Close the terminal, and wait for the program's end; its exit code, negative: it died of a signal."""
        os.close(self._terminal)
        self._terminal = os.open(os.devnull, os.O_RDONLY)
        return self._reap()

    def kill(self) -> None:
        """End it, if it has not ended; for the end of a test."""
        if self._exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._terminal)
        return self._exit_code

    @property
    def screen(self) -> list[str]:
        """The lines that the terminal shows by now, from the first one on, the one that the cursor is in last."""
        return shown(self.said)

    def _read(self) -> bool:
        """Take what there is, within a while; False: the program has ended."""
        readable, _, _ = select.select([self._terminal], [], [], 0.2)
        if not readable:
            return True
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:  # the terminal's other end is closed
            return False
        self.said += piece.decode(errors="replace")
        return bool(piece)


def launcher(*words: str) -> tuple[str, ...]:
    """`torchelastic WORD ..`, for an interpreter."""
    return ("-m", "torchelastic.launch", *words)


def shown(said: str) -> list[str]:
    """What a terminal that is high enough shows once it was sent all this, without colours."""
    lines, row, column = [""], 0, 0
    for token in _TOKEN.findall(said):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token.startswith("\x1b["):
            if token.endswith("K"):
                lines[row] = "" if token == "\x1b[2K" else lines[row][:column]
            elif token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
        else:
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]
