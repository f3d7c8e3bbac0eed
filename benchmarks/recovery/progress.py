"""How far a run is, on stderr while it runs: a bar on a terminal, else a line every `LINE_S`."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as Bar
from rich.text import Text

#: Between two lines where stderr is no terminal.
LINE_S = 10.0


def time_left_s(elapsed_s: float, done: int, total: int) -> float | None:
    """How long the rest takes if it goes on like this; None: nothing is done yet.

    >>> time_left_s(30.0, 10, 40)
    90.0
    """
    return elapsed_s / done * (total - done) if done else None


def progress_line(mode: str, done: int, kills: int, slowest_ms: float, left_s: float | None) -> str:
    """One line for people.

    >>> progress_line("drop", 12, 20, 178.4, 90.0)
    'drop: 12 of 20 kills, slowest 178 ms, about 90 s left'
    >>> progress_line("drop", 0, 200, 0.0, None)
    'drop: 0 of 200 kills'
    """
    parts = [f"{mode}: {done} of {kills} kills"]
    if slowest_ms:
        parts.append(f"slowest {slowest_ms:.0f} ms")
    if left_s is not None:
        parts.append(f"about {left_s:.0f} s left" if left_s < 120 else f"about {left_s / 60:.0f} min left")
    return ", ".join(parts)


class Progress:
    """Shows the progress for the length of its block.

    Args:
        modes: how many runs there are.
        kills: of each.
    """

    def __init__(self, modes: int, kills: int) -> None:
        self._total, self._kills = modes * kills, kills
        self._mode, self._number, self._done = "", -1, 0
        self._slowest_ms, self._killed_s = 0.0, float("inf")
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._stack = ExitStack()
        self._bar: tuple[Bar, TaskID] | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            bar = Bar(_Line(self), BarColumn(bar_width=16), console=Console(stderr=True), transient=True)
            self._bar = self._stack.enter_context(bar), bar.add_task("", total=self._total)
        else:
            thread = threading.Thread(target=self._write_lines, name="progress", daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._over.set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def mode_begins(self, mode: str) -> None:
        """The next run begins; kills that the last one has left out are not waited for any more."""
        self._mode, self._number, self._done, self._slowest_ms = mode, self._number + 1, 0, 0.0
        self._killed_s = float("inf")
        self._show()

    def killed(self, killed_s: float) -> None:
        """A worker was killed then (monotonic clock): until `recovered` the time since counts as the slowest."""
        self._killed_s = killed_s

    def recovered(self, total_ms: float) -> None:
        """The recovery from the last kill is over, or was given up, after so long."""
        self._done, self._slowest_ms = self._done + 1, max(self._slowest_ms, total_ms)
        self._killed_s = float("inf")
        self._show()

    def line(self) -> str:
        """The present state, for people; any thread may ask."""
        now_s = time.monotonic()
        slowest_ms = max(self._slowest_ms, 1000 * (now_s - self._killed_s))
        left_s = time_left_s(now_s - self._began_s, self._all_done, self._total)
        return progress_line(self._mode, self._done, self._kills, slowest_ms, left_s)

    @property
    def _all_done(self) -> int:
        return max(0, self._number) * self._kills + self._done

    def _show(self) -> None:
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self._all_done)

    def _write_lines(self) -> None:
        while not self._over.wait(LINE_S):
            print(self.line(), file=sys.stderr, flush=True)


class _Line(ProgressColumn):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:  # noqa: ARG002 - the progress itself knows more than its bar
        return Text(self._progress.line())
