"""The agent writes the status of its host into etcd, under its lease, as often as somebody reads it.

etcd keeps every version of a key until its history is compacted, and not every etcd is set up to do that: some
kilobytes a second from each host would fill it in days. So whoever watches a run writes the key `look` now and then.
Agents read its revision once in a period, which leaves no trace, and only while it changes do they write every period.
Else every ten minutes, for those who may only read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from torchelastic.observe.status.run_status import HostStatus, every_s
from torchelastic.observe.status.status_format import encode_host, most_bytes
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Whoever watches a run writes the key `look` so often.
LOOK_EVERY_S = 5.0
#: So long after its last change nobody watches any more.
ATTEND_S = 3 * LOOK_EVERY_S
#: Between two statuses while nobody watches.
IDLE_EVERY_S = 600.0


@dataclass(frozen=True)
class Attention:
    """Whether somebody watches, and when a status is due. A value.

    Attributes:
        revision: of the key `look`, as last seen; -1: never seen.
        until_s: somebody watches until then.
        written_s: when the last status was written; -inf: never.
        was_watched: whether somebody watched when it was.
        lease: which it went with; 0: none.
    """

    revision: int = -1
    until_s: float = -math.inf
    written_s: float = -math.inf
    was_watched: bool = False
    lease: int = 0

    def seen(self, revision: int, now_s: float) -> Attention:
        """Once the key has been read: 0, where it does not exist."""
        if revision == self.revision:
            return self
        until_s = now_s + ATTEND_S if revision else -math.inf
        return replace(self, revision=revision, until_s=until_s)

    def written(self, now_s: float, lease: int) -> Attention:
        """Once a status has been written."""
        return replace(self, written_s=now_s, was_watched=self.is_watched(now_s), lease=lease)

    def is_watched(self, now_s: float) -> bool:
        """Whether somebody watches."""
        return now_s < self.until_s

    def is_due(self, now_s: float, lease: int) -> bool:
        """Whether a status is to be written now: while somebody watches, every time.

        Once nobody does any more there is one further status, which says when the next one follows. What was written
        goes with its lease, so a new lease wants a new one.
        """
        is_old = now_s - self.written_s >= IDLE_EVERY_S or lease != self.lease
        return self.is_watched(now_s) or self.was_watched or is_old


def agents_of(members: Collection[str]) -> int:
    """How many agents a roster's members are of, by their ids; at least one.

    >>> agents_of(["a-0-3f0a77c11", "a-1-3f0a77c12", "b-0-99aa88bb1"])
    2
    """
    return max(1, len({MemberId.of(member).incarnation for member in members}))


class Publisher:
    """Writes the status of one host. Construct and use it on one event loop; it never blocks anything else.

    One call of the store is under way at most, on a thread of its own: when etcd does not answer, nothing piles up.

    Args:
        store: any thread may call it.
        keys: the run's keys.
        incarnation: of the agent.
        lease: gives the lease that the status is to go with; 0: there is none, because etcd is unreachable, and it is
            not asked for anything.
        status: makes the status, given the seconds until the next one; called every period.
        agents: gives the number of agents in the run.
        clock: monotonic seconds.
        sleep: as `asyncio.sleep`.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        incarnation: str,
        *,
        lease: Callable[[], int],
        status: Callable[[float], HostStatus],
        agents: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store, self._look_at, self._key = store, keys.look, keys.status + incarnation
        self._lease, self._status, self._agents = lease, status, agents
        self._clock, self._sleep = clock, sleep
        self._attention = Attention()
        self._thread = ThreadPoolExecutor(1, "status")

    async def run(self) -> None:
        """Write statuses for ever; cancel it to end it for good. After an error it may be run again."""
        try:
            while True:
                await self.once()
                await self._sleep(every_s(self._agents()))
        except asyncio.CancelledError:
            self._thread.shutdown(wait=False)
            raise

    async def once(self) -> None:
        """One period: see whether somebody watches, and write what is due. Errors of the store are not raised."""
        try:
            if self._lease():
                kv = await self._ask(lambda store: store.get(self._look_at))
                self._attention = self._attention.seen(0 if kv is None else kv.mod_revision, self._clock())
            hosts, now_s, lease_id = self._agents(), self._clock(), self._lease()
            status = self._status(every_s(hosts) if self._attention.is_watched(now_s) else IDLE_EVERY_S)
            if lease_id and self._attention.is_due(now_s, lease_id):
                value = encode_host(status, most_bytes(hosts))
                await self._ask(lambda store: store.put(self._key, value, lease_id))
                self._attention = self._attention.written(now_s, lease_id)
        except StoreError as error:
            log.debug("the status of this host was not written: %s", error)  # the membership logs it, once

    async def _ask(self, call: Callable[[CoordinationStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, self._store)
