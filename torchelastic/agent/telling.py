"""The agent tells what its host looks like: to etcd, to its terminal, and to whoever asks it itself."""

from __future__ import annotations

import asyncio

from torchelastic.agent.bookkeeping import Bookkeeping
from torchelastic.agent.membership import Membership
from torchelastic.agent.shown_progress import ShownProgress
from torchelastic.agent.tasks import keep_running
from torchelastic.agent.terminal import Terminal
from torchelastic.ledger.host_ledger import HostLedger
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.status.host import HostView
from torchelastic.status.publishing import Publisher, agents_of
from torchelastic.status.run_status import HostStatus


class Telling:
    """Use it on the agent's event loop.

    Args:
        store: of the run.
        keys: the run's keys.
        host: this host's name.
        incarnation: of the agent.
        membership: this host's part in the run.
        books: the ledger of this host; None: none is kept, because its worker is not started here.
        terminal: where the training's progress is shown; None: nowhere.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        *,
        host: str,
        incarnation: str,
        membership: Membership,
        books: Bookkeeping | None,
        terminal: Terminal | None = None,
    ) -> None:
        self.view = HostView(host, incarnation) if books is None else books.view
        #: URL of what the agent serves; empty: nothing.
        self.address = ""
        self._membership, self._books = membership, books
        self._publisher = Publisher(
            store,
            keys,
            incarnation,
            lease=lambda: membership.lease,
            status=self.status,
            agents=lambda: agents_of(membership.round.roster),
        )
        self._shown = None if books is None or terminal is None else ShownProgress(self.status, terminal)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Tell etcd and the terminal from now on."""
        what = "telling the status of this host"
        self._tasks.append(asyncio.ensure_future(keep_running(what, self._publisher.run)))
        if self._shown is not None:
            self._tasks.append(asyncio.ensure_future(keep_running("showing the progress", self._shown.run)))

    def stop(self) -> None:
        """Tell nothing any more."""
        for task in self._tasks:
            task.cancel()
        if self._shown is not None and self._books is not None:
            self._shown.end(self.view.furthest(self._books.keeper.now()))

    def status(self, every_s: float = 1.0) -> HostStatus:
        """What this host looks like now; the next one is told so many seconds after it."""
        books = self._books
        if books is not None:
            books.look()  # how things are now, not at the last look
        return self.view.status(
            HostLedger() if books is None else books.keeper.now(),
            every_s,
            pids={} if books is None else books.pids(),
            places=0 if books is None else len(books.latest().places),
            journal="" if books is None else books.journal,
            address=self.address,
            is_etcd_away=not self._membership.sees_store,
        )
