"""How far the training is, in the launcher's terminal or its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from torchelastic.agent.event_log import events_log
from torchelastic.agent.tasks import keep_running
from torchelastic.agent.terminal import Terminal
from torchelastic.log_lines import fields
from torchelastic.observe.status.run_progress import Progress
from torchelastic.observe.status.run_status import HostStatus, by_rank, progress_of

#: Between two looks.
LOOK_S = 1.0
#: Where the screen is no terminal, the first line comes after so long, and each next one after twice as long, up to ..
FIRST_LINE_S, MOST_BETWEEN_LINES_S = 60.0, 1800.0


def next_line_s(since_s: float) -> float:
    """When the next line is due, in seconds from the first look on, after one that came then.

    >>> next_line_s(0.0), next_line_s(60.0), next_line_s(7200.0)
    (60.0, 120.0, 9000.0)
    """
    return since_s + min(max(since_s, FIRST_LINE_S), MOST_BETWEEN_LINES_S)


class ShownProgress:
    """How far the training is: a line at the bottom of a terminal, or else a line in the log now and then.

    Use it on the agent's event loop.

    Args:
        status: gives what the host looks like now.
        terminal: the screen.
        waits: says what the training waits for, instead of how fast it goes; empty: for nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        status: Callable[[], HostStatus],
        terminal: Terminal,
        waits: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._terminal, self._waits, self._clock = status, terminal, waits, clock
        self._began_s: float | None = None
        self._due_s = next_line_s(0.0)
        self._showing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Show it from now on."""
        self._showing = asyncio.ensure_future(keep_running("showing the progress", self._run))

    def stop(self, furthest: Progress) -> None:
        """The training is over for this host, and came so far: a terminal keeps the last line."""
        if self._showing is not None:
            self._showing.cancel()
            self.end(furthest)

    async def _run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Show how things are now, if it is time to."""
        progress, waits = progress_of(by_rank(self._status().workers)), self._waits()
        if waits:
            progress = replace(progress, steps_per_s=0.0)
        parts = [*progress.parts(), *filter(None, [waits])]
        if not parts:
            return
        if self._terminal.is_live:
            self._terminal.progresses(progress.step, "  ".join(parts))
            return
        self._began_s = self._clock() if self._began_s is None else self._began_s
        since_s = self._clock() - self._began_s
        if since_s >= self._due_s:
            self._due_s = next_line_s(self._due_s)
            self._log(progress, ", ".join(parts))

    def end(self, furthest: Progress) -> None:
        """The training is over for this host: a terminal keeps the last line."""
        if self._terminal.is_live:
            self._terminal.progresses(-1, "")
            if furthest.step >= 0:
                self._log(furthest, furthest.parts()[0])

    def _log(self, progress: Progress, text: str) -> None:
        known = fields(
            kind="progress", step=progress.step, end_step=progress.end_step, steps_per_s=progress.steps_per_s,
            loss=progress.loss,
        )  # fmt: skip
        events_log.info(text, extra=known)
