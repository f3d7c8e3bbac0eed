"""How far the training is, by itself: a line at the bottom of a terminal, or else a line in the log now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from torchelastic.agent.event_log import events_log
from torchelastic.agent.terminal import Terminal
from torchelastic.log_lines import fields
from torchelastic.status.progress import Progress
from torchelastic.status.run_status import HostStatus, by_rank, progress_of

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
    """Use it on the agent's event loop.

    Args:
        status: gives what the host looks like now.
        terminal: the screen.
        clock: monotonic seconds.
    """

    def __init__(
        self, status: Callable[[], HostStatus], terminal: Terminal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status, self._terminal, self._clock = status, terminal, clock
        self._began_s: float | None = None
        self._due_s = next_line_s(0.0)

    async def run(self) -> None:
        """Show it for ever; cancel it to end it."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Show how things are now, if it is time to."""
        progress = progress_of(by_rank(self._status().workers))
        if progress.step < 0:
            return
        if self._terminal.is_live:
            self._terminal.progresses(progress.step, "  ".join(progress.parts()))
            return
        self._began_s = self._clock() if self._began_s is None else self._began_s
        since_s = self._clock() - self._began_s
        if since_s >= self._due_s:
            self._due_s = next_line_s(self._due_s)
            self._log(progress, ", ".join(progress.parts()))

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
