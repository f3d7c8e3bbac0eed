"""What a person reads: the line while it runs, and the summary of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: A terminal is written to at most so often.
_EVERY_S = 0.5


@dataclass(frozen=True)
class LifetimeSummary:
    """What an `IterManager` has seen. `str` of it is for people.

    Attributes:
        iterations: of the run that are done.
        total_iters: of the run; -1: not known.
        avg_iter_s: usual iteration, without pauses.
        max_iter_s: the longest of those that count.
        first_iters_s: the first iterations, which were set apart.
        forecast_s: for the rest of the run; None: its length is not known.
        saves: by tier, how many were measured, with the longest in seconds.
        deadline: the nearest, for people.
        remaining_s: until then; None: none is known.
        decision: the last decision to stop; "" if there was none.
        given_up_s: seconds that were left when the save before the deadline was done; None: there was none yet.
    """

    iterations: int
    total_iters: int
    avg_iter_s: float
    max_iter_s: float
    first_iters_s: tuple[float, ...]
    forecast_s: float | None
    saves: tuple[tuple[str, int, float], ...]
    deadline: str
    remaining_s: float | None
    decision: str
    given_up_s: float | None

    def __str__(self) -> str:
        of = f" of {self.total_iters}" if self.total_iters > 0 else ""
        first = ", ".join(f"{seconds:.3g}" for seconds in self.first_iters_s) or "none"
        lines = [
            f"iterations: {self.iterations}{of}, {self.avg_iter_s:.3g} s each, the longest {self.max_iter_s:.3g} s, "
            f"set apart at the start: {first} s"
        ]
        if self.forecast_s is not None:
            lines.append(f"rest of the run: {clock_time(self.forecast_s)}")
        lines += [f"saves to {tier!r}: {count}, the longest {longest:.3g} s" for tier, count, longest in self.saves]
        left = "" if self.remaining_s is None else f", in {self.remaining_s:.1f} s"
        lines.append(f"deadline: {self.deadline}{left}")
        if self.decision:
            lines.append(f"decision: {self.decision}")
        if self.given_up_s is not None:
            lines.append(f"given up: {self.given_up_s:.1f} s were left when the save was done")
        return "\n".join(lines)


def clock_time(seconds: float) -> str:
    """A duration as one reads it.

    >>> clock_time(3723.4), clock_time(59.9), clock_time(90000)
    ('1:02:03', '0:00:59', '1 day, 1:00:00')
    """
    return str(timedelta(seconds=int(seconds)))


def progress_line(
    iterations: int, total_iters: int, avg_iter_s: float, forecast_s: float | None, remaining_s: float | None
) -> str:
    """One line on how far the run is.

    >>> progress_line(120, 1000, 0.25, 220.0, 600.0)
    'iteration 120 of 1000 (12 %), 0.25 s each, ETA 0:03:40, deadline in 0:10:00'
    >>> progress_line(7, -1, 0.25, None, None)
    'iteration 7, 0.25 s each'
    """
    parts = [f"iteration {iterations}"]
    if total_iters > 0:
        parts[0] += f" of {total_iters} ({100 * iterations / total_iters:.0f} %)"
    if avg_iter_s > 0.0:
        parts.append(f"{avg_iter_s:.3g} s each")
    if forecast_s is not None:
        parts.append(f"ETA {clock_time(forecast_s)}")
    if remaining_s is not None:
        parts.append(f"deadline in {clock_time(max(0.0, remaining_s))}")
    return ", ".join(parts)


class Screen:
    """A line on a terminal that is written over again and again; nothing where there is no terminal.

    Args:
        stream: default: stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_terminal = bool(self._stream.isatty())
        self._next_s = 0.0
        self._console: Console | None = None

    def show(self, line: str, now_s: float) -> None:
        """Write the line, if there is a terminal and the one before is old enough."""
        if not self.is_terminal or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream)
        self._console.print(line, end="\r", soft_wrap=False, overflow="ellipsis", no_wrap=True, highlight=True)
