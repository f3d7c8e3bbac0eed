"""Reads a run's status out of etcd, from any machine, and announces that somebody watches; see `publishing`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchelastic.observe.status.publishing import LOOK_EVERY_S
from torchelastic.observe.status.run_status import HostStatus, RunStatus, combined
from torchelastic.observe.status.status_format import decode_host
from torchelastic.rendezvous.leadership import read_members
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import NO_ROUND, KeptOut, Keys, RecordError, Round, decode_round
from torchelastic.rendezvous.store import CoordinationStore, KeyValue, StoreAccessError, StoreUnavailableError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.text import escaped

log = logging.getLogger(__name__)

#: Between two checks for an answer.
POLL_S = 0.1
#: An answer that takes longer comes from an etcd that was away.
AWAY_S = 3.0
#: So many agents that are gone are listed.
MOST_LEFT = 64


@dataclass(frozen=True)
class _Read:
    """A status as it was read: with its time by the clock of this process as far as that is known."""

    revision: int
    status: HostStatus


class StatusReader:
    """Reads a run's status again and again. Not thread-safe.

    Clocks of hosts differ: what is known to have been written between two reads is taken as written between them. While
    etcd is away no host can write: that time makes none of them older.

    Args:
        store: of the run's etcd.
        url: of the run.
        clock: Unix seconds.
        sleep: as `time.sleep`.
    """

    def __init__(
        self,
        store: CoordinationStore,
        url: RendezvousUrl,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._keys, self._run_id = store, Keys(url.root), url.run_id
        self._clock, self._sleep = clock, sleep
        self._reads: dict[str, _Read] = {}
        self._seen: dict[str, HostStatus] = {}
        self._refused: set[str] = set()
        self._may_look = True
        self._look_s = self._first_look_s = self._read_s = float("-inf")
        self._asked_s: float | None = None
        self._away_s = 0.0
        self._look_revision = 0

    def read(self) -> RunStatus:
        """The status as etcd has it now; agents are notified that somebody watches.

        Raises:
            StoreError: etcd is unreachable, or refuses.
        """
        if self._asked_s is None:  # else etcd has not answered since then
            self._asked_s = self._clock()
        self.look()
        store, keys = self._store, self._keys
        round_ = self._round(store.get(keys.round))
        members = read_members(store.list_prefix(keys.members).items)
        agents = [kv.key for kv in store.list_prefix(keys.agents).items]
        statuses = store.list_prefix(keys.status).items
        kept_out = dict(filter(None, map(self._kept_out, store.list_prefix(keys.kept_out).items)))
        now_s = self._clock()
        self._away_s = away_s if (away_s := now_s - self._asked_s) > AWAY_S else 0.0
        self._reads = dict(filter(None, (self._take(kv, now_s) for kv in statuses)))
        self._read_s, self._asked_s = now_s, None
        hosts = [read.status for read in self._reads.values()]
        known = {host.incarnation for host in hosts}
        hosts += [host for host in map(self._silent, agents) if host.incarnation not in known]
        return combined(self._run_id, now_s, round_, members, hosts, self._left(hosts, round_), kept_out)

    def read_fresh(self, patience_s: float) -> RunStatus:
        """The status once every agent has written a new one, or what there is after `patience_s`.

        Raises:
            StoreError: etcd is unreachable, or refuses.
        """
        until_s = self._clock() + patience_s
        while True:
            status = self.read()
            is_fresh = not status.silent and all(one.revision > self._look_revision for one in self._reads.values())
            if not self._may_look or is_fresh or self._clock() >= until_s:
                return status
            self._sleep(POLL_S)

    def look(self) -> None:
        """Notify the agents that somebody watches, if etcd takes writes; `read` does that, too. Raises StoreError."""
        if not self._may_look or self._clock() - self._look_s < LOOK_EVERY_S:
            return
        try:
            revision = self._store.put(self._keys.look, b"")
        except StoreAccessError as error:
            log.info("agents cannot be notified that somebody watches: %s", error)
            self._may_look = False
            return
        except StoreUnavailableError as error:  # a full etcd takes no writes, and can be read
            log.info("agents are not notified for now that somebody watches: %s", error)
            self._look_s = self._clock()
            return
        self._look_s = self._clock()
        if not self._look_revision:
            self._look_revision, self._first_look_s = revision, self._look_s

    def _round(self, kv: KeyValue | None) -> Round:
        if kv is None:
            return NO_ROUND
        try:
            return decode_round(kv.key, kv.value)
        except RecordError as error:
            return Round(because=f"the value at the round's key is none: {error}")

    def _kept_out(self, kv: KeyValue) -> tuple[str, KeptOut] | None:
        try:
            return escaped(kv.key.removeprefix(self._keys.kept_out)), KeptOut.decode(kv.key, kv.value)
        except RecordError as error:
            self._ignore(error, kv)
            return None

    def _ignore(self, error: RecordError, kv: KeyValue) -> None:
        """Say it once."""
        if kv.key not in self._refused:
            self._refused.add(kv.key)
            log.error("ignored: %s", error)

    def _take(self, kv: KeyValue, now_s: float) -> tuple[str, _Read] | None:
        before = self._reads.get(kv.key)
        if before is not None and before.revision == kv.mod_revision:
            return kv.key, replace(before, status=replace(before.status, at_s=before.status.at_s + self._away_s))
        try:
            status = decode_host(kv.key, kv.value)
        except RecordError as error:
            self._ignore(error, kv)
            return None
        answers = kv.mod_revision > self._look_revision > 0
        earliest_s = max(self._read_s, self._first_look_s if answers else self._read_s)
        return kv.key, _Read(kv.mod_revision, replace(status, at_s=min(max(status.at_s, earliest_s), now_s)))

    def _left(self, hosts: list[HostStatus], round_: Round) -> list[HostStatus]:
        """Agents that this reader has seen before, or whose members the round's document names, and that are gone."""
        here = {host.incarnation for host in hosts}
        named = {host.incarnation: host for host in map(_agent_of, (*round_.roster, *round_.departed, *round_.lost))}
        self._seen = {**self._seen, **{host.incarnation: host for host in hosts}}
        gone = {**named, **self._seen}
        newest = [host for name, host in gone.items() if name not in here][-MOST_LEFT:]
        self._seen = {host.incarnation: host for host in (*newest, *hosts)}
        return newest

    def _silent(self, key: str) -> HostStatus:
        """Of an agent that is there and has written nothing: not yet, or because it is that of an earlier version."""
        host, _, agent_id = escaped(key.removeprefix(self._keys.agents)).partition("/")
        return HostStatus(host=host, incarnation=agent_id.rpartition("-")[2], at_s=0.0)


def _agent_of(member_id: str) -> HostStatus:
    """The agent of a member, by its id."""
    parts = MemberId.of(member_id)
    return HostStatus(host=parts.host, incarnation=parts.incarnation, at_s=0.0)


def is_known(status: RunStatus) -> bool:
    """Whether there is, or was, such a run."""
    return bool(status.round != NO_ROUND or status.members or status.hosts or status.silent or status.kept_out)
