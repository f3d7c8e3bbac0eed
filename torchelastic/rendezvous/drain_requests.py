"""Requests, made by people, that a member of one host leaves the run: read, carried out, cleared out of the store."""

from __future__ import annotations

from collections.abc import Callable

from torchelastic.rendezvous.requests import OpenWatch, list_prefix
from torchelastic.rendezvous.store import Delete, KeyValue


class DrainRequests:
    """See the module's docstring.

    Args:
        prefix: of this host's requests; the rest of a key is the member's id. Values mean nothing.
        on_drain: called with each member that is to leave, more than once for one request where a session ends; returns
            whether it is a member of this agent: a host may have several agents.
    """

    def __init__(self, prefix: str, on_drain: Callable[[str], bool]) -> None:
        self.prefix = prefix
        #: keys of requests that were passed on, and stand in the store until they are deleted
        self.carried_out: dict[str, None] = {}
        self._on_drain = on_drain

    async def follow(self) -> None:
        """Take in what stands there, and follow what comes."""
        listing = await list_prefix(self.prefix)
        self.carried_out.clear()
        for kv in listing.items:
            self.take(kv, is_put=True)
        await OpenWatch(self.prefix, listing.revision + 1)

    def take(self, kv: KeyValue, *, is_put: bool) -> None:
        """One of the keys was written or has gone."""
        if not is_put:
            self.carried_out.pop(kv.key, None)
        elif self._on_drain(kv.key.removeprefix(self.prefix)):
            self.carried_out[kv.key] = None

    def deletions(self, at_most: int) -> list[Delete]:
        """What to write so that nobody takes up again what was carried out."""
        return [Delete(key) for key in list(self.carried_out)[:at_most]]

    def deleted(self, deletions: list[Delete]) -> None:
        """These were written."""
        for deletion in deletions:
            self.carried_out.pop(deletion.key, None)
