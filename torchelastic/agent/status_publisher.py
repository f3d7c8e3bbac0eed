"""The agent publishes the status of its host: to etcd, and to whoever asks it itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from torchelastic.agent.host_events import Event, LedgerWritten, MetricsPublished, RoundChanged, WorkerExited
from torchelastic.agent.membership import Membership
from torchelastic.agent.tasks import keep_running
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.status.host_view import HostView
from torchelastic.observe.status.publishing import Publisher, agents_of
from torchelastic.observe.status.run_status import HostStatus
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore

if TYPE_CHECKING:
    from torchelastic.agent.ledger_recorder import LedgerRecorder


class StatusPublisher:
    """Use it on the agent's event loop.

    Args:
        store: of the run.
        keys: the run's keys.
        host: this host's name.
        incarnation: of the agent.
        membership: this host's part in the run.
        recorder: of the ledger of this host; None: none is kept, because its worker is not started here.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        *,
        host: str,
        incarnation: str,
        membership: Membership,
        recorder: LedgerRecorder | None = None,
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
        """Publish to etcd from now on."""
        what = "publishing the status of this host"
        self._tasks.append(asyncio.ensure_future(keep_running(what, self._publisher.run)))

    def stop(self) -> None:
        """Publish nothing any more."""
        for task in self._tasks:
            task.cancel()

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
