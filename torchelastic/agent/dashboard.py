"""The live page that the agent serves."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable

from torchelastic.observe.page.document import About
from torchelastic.observe.page.listening import PageOptions
from torchelastic.observe.page.page_server import PageServer
from torchelastic.observe.page.source import RunSource
from torchelastic.observe.status.run_status import HostStatus
from torchelastic.observe.status.status_reader import StatusReader
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.url import RendezvousUrl
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
