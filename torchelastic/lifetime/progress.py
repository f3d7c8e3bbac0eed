"""Progress of a run: for people a line on the terminal and a summary, for the launcher a file of JSON.

The format of the file is in docs/simulate-esi.md.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

#: The path of the progress file; `torchelastic simulate-esi` sets it.
PROGRESS_VARIABLE = "TORCHELASTIC_PROGRESS_FILE"
#: Seconds between two writes to a terminal, or to the progress file unless there is a reason to write at once.
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


class TerminalLine:
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


@dataclass(frozen=True)
class Steps:
    """What the file holds; steps count over all incarnations of the job. None: not reported.

    Attributes:
        resumed_step: what this incarnation resumed from.
        committed_step: the last step that is done.
        saved_step: the last step that the next incarnation can resume from.
        total_steps: of the run. Reported when it is known whether the run is over: a job that exits with 0 after fewer
            is started again.
    """

    resumed_step: int | None = None
    committed_step: int | None = None
    saved_step: int | None = None
    total_steps: int | None = None


class ProgressFile:
    """The file. If it cannot be written, there is one warning, and training goes on.

    Args:
        path: of the file; None: nothing is reported.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next_s = -math.inf
        self._last: Steps | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ProgressFile:
        """The file that `TORCHELASTIC_PROGRESS_FILE` names, if it does."""
        path = (os.environ if environment is None else environment).get(PROGRESS_VARIABLE, "").strip()
        return cls(Path(path) if path else None)

    def is_due(self, now_s: float) -> bool:
        """Whether there is a file, and it was not written for a while; monotonic seconds."""
        return self._path is not None and now_s >= self._next_s

    def report(self, steps: Steps, now_s: float) -> None:
        """Replaces the file atomically. It is not synced: its reader runs on this host, at the same time."""
        if self._path is None or steps == self._last:
            return
        self._last, self._next_s = steps, now_s + _EVERY_S
        document = {name: step for name, step in asdict(steps).items() if step is not None}
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(document) + "\n")
            partial.replace(self._path)
        except OSError as error:
            log.warning("the progress of this job is not reported: %s=%s: %s", PROGRESS_VARIABLE, self._path, error)
            self._path = None
