"""Statuses through a store: written only while somebody looks and etcd is in sight, and read with suspicion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tests.memory_store import MemoryStore
from torchelastic.observe.status.publishing import ATTEND_S, IDLE_EVERY_S, Publisher
from torchelastic.observe.status.run_status import HostStatus
from torchelastic.observe.status.status_format import decode_host
from torchelastic.observe.status.status_reader import StatusReader
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Delete,
    Put,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    TxnResult,
)
from torchelastic.rendezvous.url import parse_url

URL = parse_url("etcd://localhost/job7?min_workers=1&max_workers=8")
KEYS = Keys(URL.root)


class Clock:
    now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Agent:
    """A publisher, period by period."""

    def __init__(self, store: MemoryStore, clock: Clock, name: str = "0badcafe", skew_s: float = 0.0) -> None:
        self.store, self.clock, self.name = store, clock, name
        self.lease = store.grant_lease(3600.0).lease_id
        self.statuses: list[float] = []
        self.hosts = 1

        def status(every: float) -> HostStatus:
            self.statuses.append(every)
            return HostStatus(host=f"host-{name}", incarnation=name, at_s=clock() + skew_s, every_s=every)

        async def make() -> Publisher:
            return Publisher(
                store, KEYS, name, lease=lambda: self.lease, status=status, agents=lambda: self.hosts, clock=clock
            )

        self.publisher = asyncio.run(make())

    def periods(self, count: int = 1, passing_s: float = 1.0) -> int:
        """So many periods; how often the status was written in them."""
        before = self.version
        for _ in range(count):
            asyncio.run(self.publisher.once())
            self.clock.pass_s(passing_s)
        return self.version - before

    @property
    def version(self) -> int:
        kv = self.store.get(KEYS.status + self.name)
        return 0 if kv is None else kv.version

    def told(self) -> HostStatus:
        kv = self.store.get(KEYS.status + self.name)
        assert kv is not None
        assert kv.lease_id == self.lease, "it goes with its agent"
        return decode_host(kv.key, kv.value)


def test_while_nobody_looks_a_status_is_written_every_ten_minutes() -> None:
    agent = Agent(MemoryStore(), Clock())
    assert agent.periods(600) == 1
    assert agent.told().every_s == IDLE_EVERY_S
    assert agent.periods(1200) == 2


def test_while_somebody_looks_it_is_one_write_in_a_period_and_then_a_last_one() -> None:
    store, clock = MemoryStore(), Clock()
    agent = Agent(store, clock)
    agent.periods()
    for _ in range(3):
        store.put(KEYS.look, b"")
        assert agent.periods(5) == 5
        assert agent.told().every_s == 1.0
    assert agent.periods(100) == int(ATTEND_S) - 5 + 1
    assert agent.told().every_s == IDLE_EVERY_S, "so that nobody takes it for silent"


def test_while_etcd_is_away_it_is_asked_for_nothing_and_nothing_piles_up() -> None:
    class Counting(MemoryStore):
        calls = 0

        def get(self, key: str):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().get(key)

        def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            self.calls += 1
            return super().txn(compares, writes)

    store = Counting()
    agent = Agent(store, Clock())
    store.put(KEYS.look, b"")
    agent.periods()
    lease, agent.lease = agent.lease, 0
    before = store.calls
    for _ in range(50):
        asyncio.run(agent.publisher.once())
    assert store.calls == before
    assert len(agent.statuses) == 51, "the pace goes on being measured"
    agent.lease = lease
    asyncio.run(agent.publisher.once())
    assert store.calls == before + 2, "one look and one write"


def test_what_etcd_says_no_to_ends_nothing() -> None:
    class Failing(MemoryStore):
        error: Exception | None = None

        def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            if self.error is not None:
                raise self.error
            return super().txn(compares, writes)

    store = Failing()
    agent = Agent(store, Clock())
    store.put(KEYS.look, b"")
    for error in (StoreUnavailableError("away"), StoreAccessError("no")):
        store.error = error
        agent.periods()
    store.error = None
    store.revoke_lease(agent.lease)
    agent.periods()
    agent.lease = store.grant_lease(60.0).lease_id
    assert agent.periods() == 1


def test_a_new_lease_wants_a_new_status_though_nobody_looks() -> None:
    store = MemoryStore()
    agent = Agent(store, Clock())
    agent.periods(5)
    store.revoke_lease(agent.lease)
    assert agent.version == 0
    agent.lease = store.grant_lease(60.0).lease_id
    agent.periods()
    assert agent.version == 1


# --- reading ----------------------------------------------------------------------------------------------------------


def reader_of(store: CoordinationStore, clock: Clock) -> StatusReader:
    return StatusReader(store, URL, clock=clock, sleep=clock.pass_s)


def put_agent(store: CoordinationStore, name: str) -> None:
    store.put(f"{KEYS.agents}host-{name}/host-{name}-{name}", b"{}")


def test_who_reads_lets_the_agents_know_every_five_seconds() -> None:
    store, clock = MemoryStore(), Clock()
    agent, reader = Agent(store, clock), reader_of(store, clock)
    agent.periods(30)
    for _ in range(20):
        status = reader.read()
        agent.periods()
    assert status.hosts[0].every_s == 1.0
    assert status.at_s - status.hosts[0].at_s <= 1.0
    looks = store.get(KEYS.look)
    assert looks is not None
    assert looks.version == 4


def test_a_fresh_status_is_one_that_every_agent_wrote_after_it_was_asked() -> None:
    store, clock = MemoryStore(), Clock()
    agents = [Agent(store, clock, name) for name in ("aaaaaaaa", "bbbbbbbb")]
    for agent in agents:
        put_agent(store, agent.name)
        agent.periods(1, passing_s=0.0)
    clock.pass_s(100.0)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.pass_s(seconds)
        if len(waited) in (3, 7):
            agents[len(waited) == 7].periods(1, passing_s=0.0)

    status = StatusReader(store, URL, clock=clock, sleep=sleep).read_fresh(patience_s=5.0)
    assert len(waited) == 7
    assert all(status.at_s - host.at_s < 0.5 for host in status.hosts)


@pytest.mark.parametrize("skew_s", [-3600.0, -20.0, 0.0, 20.0, 3600.0])
def test_a_host_whose_clock_is_wrong_is_not_silent_and_one_that_stops_is(skew_s: float) -> None:
    store, clock = MemoryStore(), Clock()
    agent, reader = Agent(store, clock, skew_s=skew_s), reader_of(store, clock)
    agent.periods()
    reader.read()
    for _ in range(10):
        agent.periods()
        status = reader.read()
        assert (len(status.hosts), len(status.silent)) == (1, 0)
        assert status.at_s - 1.5 <= status.hosts[0].at_s <= status.at_s
    clock.pass_s(4.0)
    assert len(reader.read().hosts) == 1
    clock.pass_s(2.0)
    assert len(reader.read().silent) == 1


def test_an_outage_of_etcd_makes_no_host_silent_and_one_that_has_not_come_back_after_it_is() -> None:
    store, clock = MemoryStore(), Clock()
    agent, reader = Agent(store, clock), reader_of(store, clock)
    for _ in range(3):
        agent.periods()
        reader.read()
    store.stop()
    for _ in range(20):
        clock.pass_s(1.0)
        with pytest.raises(StoreError):
            reader.read()
    store.start()
    assert len(reader.read().hosts) == 1, "it could not write before"
    clock.pass_s(6.0)
    assert len(reader.read().silent) == 1, "now it could"


def test_garbage_under_one_key_is_said_once_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = MemoryStore(), Clock()
    agent = Agent(store, clock)
    agent.periods()
    store.put(f"{KEYS.status}evil", b'{"host": 5}')
    store.put(KEYS.round, b"\xff")
    store.put(KEYS.member("evil"), b"[]")
    reader = reader_of(store, clock)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            status = reader.read()
    assert [host.incarnation for host in status.hosts] == ["0badcafe"]
    assert "is none" in status.round.because
    assert len([record for record in caplog.records if "status/evil" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    "why",
    [StoreAccessError("permission denied"), StoreUnavailableError("mvcc: database space exceeded")],
    ids=["no permission", "a full etcd"],
)
def test_who_may_only_read_reads_what_there_is_without_waiting(why: StoreError) -> None:
    class ReadOnly(MemoryStore):
        writes = 0

        def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            if any(write.key == KEYS.look for write in writes):
                self.writes += 1
                raise why
            return super().txn(compares, writes)

    store, clock = ReadOnly(), Clock()
    Agent(store, clock).periods(20)
    began_s, reader = clock(), reader_of(store, clock)
    status = reader.read_fresh(patience_s=30.0)
    reader.read()
    assert clock() == began_s
    assert store.writes == 1
    assert [host.every_s for host in status.hosts] == [IDLE_EVERY_S], "not silent: it has said when it writes again"
