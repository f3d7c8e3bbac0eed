"""The agent's live page: it hands the server, which has a thread of its own, what it knows of its host."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import replace

from torchelastic.page.document import About
from torchelastic.page.listening import PageOptions
from torchelastic.page.server import PageServer
from torchelastic.page.source import RunSource
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.status.reading import StatusReader
from torchelastic.status.run_status import EventLine, HostStatus
from torchelastic.version import __version__

#: The page waits so long for the agent's own status; etcd's is older, but there.
OWN_TIMEOUT_S = 1.0


class Dashboard:
    """Construct, start and stop it on the agent's event loop.

    Args:
        options: where, and for whom.
        store: of the run; any thread may call it.
        url: of the run.
        host: this host's name.
        status: gives this host's status, on the agent's event loop.
        events: gives more events of it than a status has, on the agent's event loop.
    """

    def __init__(
        self,
        options: PageOptions,
        store: CoordinationStore,
        url: RendezvousUrl,
        *,
        host: str,
        status: Callable[[], HostStatus],
        events: Callable[[], tuple[EventLine, ...]],
    ) -> None:
        self._status, self._events = status, events
        self._loop = asyncio.get_running_loop()
        source = RunSource(StatusReader(store, url), url.run_id, self._own, About(host, __version__))
        self._server = PageServer(options, source.read)

    def start(self) -> None:
        """Serve from now on."""
        self._server.start()

    async def stop(self) -> None:
        """The agent ends: whoever looks is told, within a bound."""
        await self._loop.run_in_executor(None, self._server.stop)

    def _own(self) -> HostStatus | None:
        async def own() -> HostStatus:
            return replace(self._status(), events=self._events())

        asked = asyncio.run_coroutine_threadsafe(own(), self._loop)
        try:
            return asked.result(OWN_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            return None
