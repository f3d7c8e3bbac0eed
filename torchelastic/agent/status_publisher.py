"""The agent publishes the status of its host: to etcd, to its terminal, and to whoever asks it itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from torchelastic.agent.event_log import events_log
from torchelastic.agent.host_events import Event, LedgerWritten, MetricsPublished, RoundChanged, WorkerExited
from torchelastic.agent.ledger_recorder import LedgerRecorder
from torchelastic.agent.membership import Membership
from torchelastic.agent.tasks import keep_running
from torchelastic.agent.terminal import Terminal
from torchelastic.log_lines import fields
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.status.host_view import HostView
from torchelastic.observe.status.publishing import Publisher, agents_of
from torchelastic.observe.status.run_progress import Progress
from torchelastic.observe.status.run_status import HostStatus, by_rank, progress_of
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore

#: Between two looks.
LOOK_S = 1.0
#: Where the screen is no terminal, the first line comes after so long, and each next one after twice as long, up to ..
FIRST_LINE_S, MOST_BETWEEN_LINES_S = 60.0, 1800.0


class StatusPublisher:
    """Use it on the agent's event loop.

    Args:
        store: of the run.
        keys: the run's keys.
        host: this host's name.
        incarnation: of the agent.
        membership: this host's part in the run.
        recorder: of the ledger of this host; None: none is kept, because its worker is not started here.
        terminal: where the training's progress is shown; None: nowhere.
        waits: says what the training waits for; empty: for nothing.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        *,
        host: str,
        incarnation: str,
        membership: Membership,
        recorder: LedgerRecorder | None,
        terminal: Terminal | None = None,
        waits: Callable[[], str] = str,
    ) -> None:
        self.view = HostView(host, incarnation)
        #: URL of what the agent serves; empty: nothing.
        self.address = ""
        self._membership, self._recorder = membership, recorder
        self._publisher = Publisher(
            store,
            keys,
            incarnation,
            lease=lambda: membership.host.lease,
            status=self.status,
            agents=lambda: agents_of(membership.host.round.roster),
        )
        self._shown = None if recorder is None or terminal is None else ShownProgress(self.status, terminal, waits)
        self._tasks: list[asyncio.Task[None]] = []

    def on_event(self, event: Event) -> None:
        """Take note of what the status says."""
        match event:
            case RoundChanged(round_):
                self.view.update_round(round_)
            case LedgerWritten(at_s, happened):
                self.view.record(at_s, happened)
            case MetricsPublished(local_rank, items):
                self.view.published(local_rank, items)
            case WorkerExited(worker):
                self.view.ended(worker.local_rank)

    def start(self) -> None:
        """Publish to etcd and the terminal from now on."""
        what = "publishing the status of this host"
        self._tasks.append(asyncio.ensure_future(keep_running(what, self._publisher.run)))
        if self._shown is not None:
            self._tasks.append(asyncio.ensure_future(keep_running("showing the progress", self._shown.run)))

    def stop(self) -> None:
        """Publish nothing any more."""
        for task in self._tasks:
            task.cancel()
        if self._shown is not None and self._recorder is not None:
            self._shown.end(self.view.furthest(self._recorder.keeper.now()))

    def with_all_events(self) -> HostStatus:
        """What this host looks like now, with more events than a status has."""
        return replace(self.status(), events=self.view.lines())

    def status(self, every_s: float = 1.0) -> HostStatus:
        """What this host looks like now; the next one is published so many seconds later."""
        recorder = self._recorder
        if recorder is not None:
            recorder.sample()  # how things are now, not a second ago
        return self.view.status(
            HostLedger() if recorder is None else recorder.keeper.now(),
            every_s,
            pids={} if recorder is None else recorder.pids(),
            places=0 if recorder is None else len(recorder.latest().places),
            journal="" if recorder is None else recorder.journal,
            address=self.address,
            is_etcd_away=not self._membership.host.in_reach,
        )


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

    async def run(self) -> None:
        """Show it for ever; cancel it to end it."""
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
