"""The agent's live page: the server, which has a thread of its own, is handed what the agent knows of its host."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable

from torchelastic.page.document import About
from torchelastic.page.listening import PageOptions
from torchelastic.page.server import PageServer
from torchelastic.page.source import RunSource
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.status.reading import StatusReader
from torchelastic.status.run_status import HostStatus
from torchelastic.version import __version__

#: The page waits so long for the agent's own status; etcd's is older, but there.
OWN_TIMEOUT_S = 1.0


def dashboard(
    options: PageOptions, store: CoordinationStore, url: RendezvousUrl, host: str, status: Callable[[], HostStatus]
) -> PageServer:
    """The page's server. Call it on the agent's event loop.

    Args:
        options: where, and for whom.
        store: of the run; any thread may call it.
        url: of the run.
        host: this host's name.
        status: gives this host's status, on the agent's event loop.
    """
    loop = asyncio.get_running_loop()

    async def now() -> HostStatus:
        return status()

    def own() -> HostStatus | None:
        asked = asyncio.run_coroutine_threadsafe(now(), loop)
        try:
            return asked.result(OWN_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            return None

    source = RunSource(StatusReader(store, url), url.run_id, own, About(host, __version__))
    return PageServer(options, source.read)
