"""What every coordination store promises, asked of the one in memory and of a real etcd."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import etcd3
import pytest

from tests.memory_store import MemoryStore
from tests.waiting import wait_until
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import (
    CompactedError,
    Compare,
    CoordinationStore,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    Target,
    TxnResult,
)
from torchelastic.testing.clock import FakeClock

PATIENCE_S = 60.0
UNKNOWN_LEASE = 424242424242


class Backend(ABC):
    """A kind of store, and what its tests need beside the interface."""

    def __init__(self) -> None:
        self._clients: list[CoordinationStore] = []

    @abstractmethod
    def _connect(self) -> CoordinationStore: ...

    @abstractmethod
    def compact(self, revision: int) -> None: ...

    @abstractmethod
    def let_pass(self, seconds: float) -> None: ...

    def client(self) -> CoordinationStore:
        client = self._connect()
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


class MemoryBackend(Backend):
    def __init__(self) -> None:
        super().__init__()
        self._clock = FakeClock()
        self._store = MemoryStore(self._clock)

    def _connect(self) -> CoordinationStore:
        return self._store.connect()

    def compact(self, revision: int) -> None:
        self._store.compact(revision)

    def let_pass(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self._store.expire_due()


class EtcdBackend(Backend):
    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self._server = server

    def _connect(self) -> CoordinationStore:
        return EtcdStore([(self._server.host, self._server.port)])

    def compact(self, revision: int) -> None:
        client = etcd3.client(self._server.host, self._server.port, timeout=5)
        client.compact(revision)
        client.close()

    def let_pass(self, seconds: float) -> None:
        time.sleep(seconds)  # the server's clock is not ours to turn


@pytest.fixture(params=["memory", "etcd"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend = MemoryBackend() if request.param == "memory" else EtcdBackend(request.getfixturevalue("etcd"))
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> CoordinationStore:
    return backend.client()


class Recorder:
    """Callbacks that remember."""

    def __init__(self) -> None:
        self.events: list[StoreEvent] = []
        self.errors: list[StoreError] = []
        self._changed = threading.Condition()

    def on_events(self, events: Sequence[StoreEvent]) -> None:
        with self._changed:
            self.events.extend(events)
            self._changed.notify_all()

    def on_error(self, error: StoreError) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def wait_for_events(self, count: int) -> list[StoreEvent]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, PATIENCE_S), (
                f"{len(self.events)} of {count} events came; errors: {self.errors}"
            )
            return list(self.events)

    def wait_for_error(self) -> StoreError:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.errors), PATIENCE_S), "no error came"
            return self.errors[0]


def read(store: CoordinationStore, key: str) -> KeyValue:
    kv = store.get(key)
    assert kv is not None, f"{key} does not exist"
    return kv


def watch_from_now(store: CoordinationStore, prefix: str) -> Recorder:
    recorder = Recorder()
    store.watch(prefix, store.list_prefix(prefix).revision + 1, recorder.on_events, recorder.on_error)
    return recorder


# Keys ---------------------------------------------------------------------------------------------------------------


def test_a_key_that_was_never_written_is_none(store: CoordinationStore, run_id: str) -> None:
    assert store.get(f"{run_id}/key") is None
    assert store.list_prefix(run_id).items == ()


def test_a_key_counts_its_versions_and_remembers_its_revisions(store: CoordinationStore, run_id: str) -> None:
    key = f"{run_id}/key"
    first = store.put(key, b"one")
    assert store.get(key) == KeyValue(key, b"one", first, first, 1)
    second = store.put(key, b"two")
    assert second > first
    assert store.get(key) == KeyValue(key, b"two", first, second, 2)


def test_a_key_that_was_deleted_and_written_again_is_a_new_key(store: CoordinationStore, run_id: str) -> None:
    key = f"{run_id}/key"
    store.put(key, b"one")
    store.put(key, b"two")
    deleted = store.delete(key)
    assert store.get(key) is None
    again = store.put(key, b"three")
    assert again > deleted
    assert store.get(key) == KeyValue(key, b"three", again, again, 1)


def test_deleting_a_key_that_does_not_exist_is_no_error(store: CoordinationStore, run_id: str) -> None:
    store.delete(f"{run_id}/nothing")
    assert store.get(f"{run_id}/nothing") is None


@pytest.mark.parametrize("value", [b"", b"\0\xff\xfe", b"x" * 300_000], ids=["empty", "binary", "300 kB"])
def test_a_value_is_any_bytes(store: CoordinationStore, run_id: str, value: bytes) -> None:
    store.put(f"{run_id}/key", value)
    assert read(store, f"{run_id}/key").value == value


def test_keys_may_hold_any_letters(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/Zürich/節點", b"1")
    assert [kv.key for kv in store.list_prefix(f"{run_id}/Zürich/").items] == [f"{run_id}/Zürich/節點"]


def test_a_listing_is_ordered_by_key_and_holds_the_prefix_only(store: CoordinationStore, run_id: str) -> None:
    for name in ("b/2", "b/10", "b/1", "a/1", "b0", "b", "c/1"):
        store.put(f"{run_id}/{name}", name.encode())
    listing = store.list_prefix(f"{run_id}/b/")
    assert [kv.key for kv in listing.items] == [f"{run_id}/b/1", f"{run_id}/b/10", f"{run_id}/b/2"]
    assert [kv.value for kv in listing.items] == [b"b/1", b"b/10", b"b/2"]


def test_the_empty_prefix_lists_everything(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/key", b"1")
    assert f"{run_id}/key" in [kv.key for kv in store.list_prefix("").items]


def test_a_listing_carries_a_revision_not_older_than_its_keys(store: CoordinationStore, run_id: str) -> None:
    revision = store.put(f"{run_id}/key", b"1")
    listing = store.list_prefix(run_id)
    assert listing.revision >= revision == listing.items[0].mod_revision


def test_what_one_client_wrote_another_reads(backend: Backend, store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/key", b"1")
    assert read(backend.client(), f"{run_id}/key").value == b"1"


def test_an_empty_key_is_refused(store: CoordinationStore) -> None:
    for attempt in (lambda: store.get(""), lambda: store.put("", b"1")):
        with pytest.raises(StoreError) as caught:
            attempt()
        assert not isinstance(caught.value, StoreUnavailableError), "trying again would not help"


# Transactions -------------------------------------------------------------------------------------------------------


def test_no_value_is_that_of_a_missing_key(store: CoordinationStore, run_id: str) -> None:
    key = f"{run_id}/key"
    assert not store.txn([Compare(key, Target.VALUE, b"")], [Put(key, b"wrong")]).succeeded
    assert store.get(key) is None


@pytest.mark.parametrize("target", [Target.CREATE_REVISION, Target.MOD_REVISION, Target.VERSION])
def test_every_number_of_a_missing_key_is_zero(store: CoordinationStore, run_id: str, target: Target) -> None:
    key = f"{run_id}/key"
    assert not store.txn([Compare(key, target, 1)], [Put(key, b"wrong")]).succeeded
    assert store.get(key) is None
    assert store.txn([Compare(key, target, 0)], [Put(key, b"right")]).succeeded
    assert not store.txn([Compare(key, target, 0)], [Put(key, b"wrong")]).succeeded
    assert read(store, key).value == b"right"


@pytest.mark.parametrize("target", Target)
def test_a_comparison_holds_for_exactly_the_value_of_its_target(
    store: CoordinationStore, run_id: str, target: Target
) -> None:
    key = f"{run_id}/key"
    for value in (b"1", b"2", b"3"):
        store.put(key, value)
    kv = read(store, key)
    actual: int | bytes
    wrongs: tuple[int | bytes, ...]
    if target is Target.VALUE:
        actual, wrongs = b"3", (b"2", b"33", b"")
    else:
        number = {Target.CREATE_REVISION: kv.create_revision, Target.MOD_REVISION: kv.mod_revision, Target.VERSION: 3}
        actual, wrongs = number[target], (number[target] - 1, number[target] + 1)
    for wrong in wrongs:
        assert not store.txn([Compare(key, target, wrong)], [Put(key, b"wrong")]).succeeded
    assert read(store, key) == kv
    assert store.txn([Compare(key, target, actual)], [Put(key, b"right")]).succeeded
    assert read(store, key).value == b"right"


def test_a_transaction_does_all_its_writes_at_one_revision(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/old", b"0")
    result = store.txn([], [Put(f"{run_id}/a", b"1"), Delete(f"{run_id}/old"), Put(f"{run_id}/b", b"2")])
    assert result.succeeded
    listing = store.list_prefix(run_id)
    assert [kv.key for kv in listing.items] == [f"{run_id}/a", f"{run_id}/b"]
    assert {kv.mod_revision for kv in listing.items} == {result.revision}


def test_one_comparison_that_fails_prevents_every_write(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/a", b"1")
    holds, fails = Compare(f"{run_id}/a", Target.VERSION, 1), Compare(f"{run_id}/b", Target.VERSION, 1)
    result = store.txn([holds, fails], [Put(f"{run_id}/a", b"2"), Delete(f"{run_id}/a"[:-1] + "c")])
    assert not result.succeeded
    assert read(store, f"{run_id}/a").version == 1


@pytest.mark.parametrize("second", [Put, Delete])
def test_a_key_is_written_at_most_once_in_a_transaction(
    store: CoordinationStore, run_id: str, second: type[Put | Delete]
) -> None:
    key = f"{run_id}/key"
    write = Put(key, b"2") if second is Put else Delete(key)
    with pytest.raises(StoreError) as caught:
        store.txn([], [Put(key, b"1"), write])
    assert not isinstance(caught.value, StoreUnavailableError), "trying again would not help"
    assert store.get(key) is None


def test_a_key_may_be_deleted_twice_in_a_transaction(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/key", b"1")
    assert store.txn([], [Delete(f"{run_id}/key"), Delete(f"{run_id}/key")]).succeeded


def test_of_many_that_create_a_key_at_once_exactly_one_wins(backend: Backend, run_id: str) -> None:
    clients = [backend.client() for _ in range(4)]
    barrier = threading.Barrier(16)

    def create(index: int) -> TxnResult:
        barrier.wait(PATIENCE_S)
        absent = Compare(f"{run_id}/leader", Target.CREATE_REVISION, 0)
        return clients[index % 4].txn([absent], [Put(f"{run_id}/leader", str(index).encode())])

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(create, range(16)))
    winners = [index for index, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    leader = read(clients[0], f"{run_id}/leader")
    assert (leader.value, leader.version) == (str(winners[0]).encode(), 1)


def test_no_increment_is_lost_when_many_compare_and_swap(backend: Backend, run_id: str) -> None:
    clients = [backend.client() for _ in range(4)]
    clients[0].put(f"{run_id}/n", b"0")

    def increment(client: CoordinationStore) -> None:
        for _ in range(10):
            while True:
                kv = read(client, f"{run_id}/n")
                unchanged = Compare(kv.key, Target.MOD_REVISION, kv.mod_revision)
                if client.txn([unchanged], [Put(kv.key, str(int(kv.value) + 1).encode())]).succeeded:
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, clients))
    assert read(clients[0], f"{run_id}/n").value == b"40"


# Leases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_s", [0.1, 2.3, 60.0])
def test_a_lease_lasts_at_least_as_long_as_asked(store: CoordinationStore, asked_s: float) -> None:
    lease = store.grant_lease(asked_s)
    assert lease.ttl_s >= asked_s
    assert store.keep_alive(lease.lease_id) == lease.ttl_s
    store.revoke_lease(lease.lease_id)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_without_a_time_to_live_is_refused(store: CoordinationStore, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="time to live"):
        store.grant_lease(ttl_s)


def test_two_leases_differ(store: CoordinationStore) -> None:
    one, two = store.grant_lease(60.0), store.grant_lease(60.0)
    assert one.lease_id != two.lease_id
    store.revoke_lease(one.lease_id)
    assert store.keep_alive(two.lease_id) > 0
    store.revoke_lease(two.lease_id)


def test_revoking_a_lease_deletes_its_keys_and_no_others(store: CoordinationStore, run_id: str) -> None:
    lease = store.grant_lease(60.0)
    store.put(f"{run_id}/leased", b"1", lease.lease_id)
    store.put(f"{run_id}/stays", b"1")
    assert read(store, f"{run_id}/leased").lease_id == lease.lease_id
    recorder = watch_from_now(store, run_id)
    store.revoke_lease(lease.lease_id)
    (event,) = recorder.wait_for_events(1)
    assert (event.kind, event.kv.key) == (EventKind.DELETE, f"{run_id}/leased")
    assert [kv.key for kv in store.list_prefix(run_id).items] == [f"{run_id}/stays"]


def test_revoking_a_lease_that_is_gone_is_no_error(store: CoordinationStore) -> None:
    lease = store.grant_lease(60.0)
    store.revoke_lease(lease.lease_id)
    store.revoke_lease(lease.lease_id)
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.lease_id)


def test_a_put_on_a_lease_that_is_gone_writes_nothing(store: CoordinationStore, run_id: str) -> None:
    with pytest.raises(LeaseLostError):
        store.put(f"{run_id}/key", b"1", UNKNOWN_LEASE)
    with pytest.raises(LeaseLostError):
        store.txn([], [Put(f"{run_id}/other", b"1"), Put(f"{run_id}/key", b"1", UNKNOWN_LEASE)])
    assert store.list_prefix(run_id).items == ()


def test_a_lease_that_is_gone_does_not_matter_if_the_comparison_fails(store: CoordinationStore, run_id: str) -> None:
    fails = Compare(f"{run_id}/key", Target.VERSION, 7)
    assert not store.txn([fails], [Put(f"{run_id}/key", b"1", UNKNOWN_LEASE)]).succeeded


def test_a_key_written_again_leaves_its_old_lease(store: CoordinationStore, run_id: str) -> None:
    one, two = store.grant_lease(60.0), store.grant_lease(60.0)
    store.put(f"{run_id}/free", b"1", one.lease_id)
    store.put(f"{run_id}/free", b"2")
    store.put(f"{run_id}/moved", b"1", one.lease_id)
    store.put(f"{run_id}/moved", b"2", two.lease_id)
    store.revoke_lease(one.lease_id)
    assert [kv.lease_id for kv in store.list_prefix(run_id).items] == [0, two.lease_id]
    store.revoke_lease(two.lease_id)
    assert [kv.key for kv in store.list_prefix(run_id).items] == [f"{run_id}/free"]


def test_the_keys_of_an_expired_lease_go_and_the_lease_with_them(
    backend: Backend, store: CoordinationStore, run_id: str
) -> None:
    lease = store.grant_lease(1.0)
    for name in "ba":
        store.put(f"{run_id}/{name}", b"1", lease.lease_id)
    recorder = watch_from_now(store, run_id)
    backend.let_pass(lease.ttl_s)
    events = recorder.wait_for_events(2)
    assert [(event.kind, event.kv.key[-1]) for event in events] == [(EventKind.DELETE, "a"), (EventKind.DELETE, "b")]
    assert len({event.kv.mod_revision for event in events}) == 1, "one lease ends in one revision"
    assert store.list_prefix(run_id).items == ()
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.lease_id)
    with pytest.raises(LeaseLostError):
        store.put(f"{run_id}/key", b"1", lease.lease_id)


def test_a_lease_that_is_kept_alive_outlives_its_time(backend: Backend, store: CoordinationStore, run_id: str) -> None:
    lease = store.grant_lease(2.0)
    store.put(f"{run_id}/key", b"1", lease.lease_id)
    for _ in range(3):
        backend.let_pass(lease.ttl_s / 2)
        assert store.keep_alive(lease.lease_id) == lease.ttl_s
    assert read(store, f"{run_id}/key").value == b"1"
    store.revoke_lease(lease.lease_id)


# Watches ------------------------------------------------------------------------------------------------------------


def test_a_watch_reports_every_change_once_and_in_order(
    backend: Backend, store: CoordinationStore, run_id: str
) -> None:
    recorder = watch_from_now(store, f"{run_id}/")
    clients = [backend.client() for _ in range(3)]

    def write(index: int) -> list[int]:
        return [clients[index].put(f"{run_id}/{index}", str(n).encode()) for n in range(20)]

    with ThreadPoolExecutor(3) as pool:
        revisions = sorted(revision for done in pool.map(write, range(3)) for revision in done)
    last = store.put(f"{run_id}/end", b"")
    events = recorder.wait_for_events(61)
    assert [event.kv.mod_revision for event in events] == [*revisions, last]
    for index in range(3):
        mine = [int(event.kv.value) for event in events if event.kv.key == f"{run_id}/{index}"]
        assert mine == list(range(20))


def test_a_watch_starts_with_the_history_from_its_revision(store: CoordinationStore, run_id: str) -> None:
    revisions = [store.put(f"{run_id}/key", str(n).encode()) for n in range(6)]
    recorder = Recorder()
    store.watch(run_id, revisions[2], recorder.on_events, recorder.on_error)
    recorder.wait_for_events(4)
    store.put(f"{run_id}/key", b"6")
    assert [event.kv.value for event in recorder.wait_for_events(5)] == [b"2", b"3", b"4", b"5", b"6"]


def test_a_watch_from_after_the_listing_repeats_nothing_of_it(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/listed", b"1")
    recorder = watch_from_now(store, run_id)
    revision = store.put(f"{run_id}/new", b"2")
    (event,) = recorder.wait_for_events(1)
    assert event == StoreEvent(EventKind.PUT, KeyValue(f"{run_id}/new", b"2", revision, revision, 1))


def test_a_watch_of_the_future_reports_only_what_happens_then(store: CoordinationStore, run_id: str) -> None:
    recorder = Recorder()
    now = store.put(f"{run_id}/key", b"0")
    store.watch(run_id, now + 3, recorder.on_events, recorder.on_error)
    revisions = [store.put(f"{run_id}/key", str(n).encode()) for n in range(1, 6)]
    expected = [revision for revision in revisions if revision >= now + 3]
    events = recorder.wait_for_events(len(expected))
    assert [event.kv.mod_revision for event in events] == expected


def test_a_deletion_is_reported_with_its_revision_and_no_value(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/key", b"1")
    recorder = watch_from_now(store, run_id)
    revision = store.delete(f"{run_id}/key")
    (event,) = recorder.wait_for_events(1)
    assert event == StoreEvent(EventKind.DELETE, KeyValue(f"{run_id}/key", b"", 0, revision, 0))


def test_a_transaction_is_reported_in_the_order_of_its_writes(store: CoordinationStore, run_id: str) -> None:
    store.put(f"{run_id}/m", b"0")
    recorder = watch_from_now(store, run_id)
    result = store.txn([], [Put(f"{run_id}/z", b"1"), Delete(f"{run_id}/m"), Put(f"{run_id}/a", b"2")])
    events = recorder.wait_for_events(3)
    assert [event.kv.key[-1] for event in events] == ["z", "m", "a"]
    assert {event.kv.mod_revision for event in events} == {result.revision}


def test_a_watch_sees_its_prefix_only(store: CoordinationStore, run_id: str) -> None:
    recorder = watch_from_now(store, f"{run_id}/b/")
    for name in ("a/1", "b", "b0", "c/1", "b/1"):
        store.put(f"{run_id}/{name}", b"1")
    store.txn([], [Put(f"{run_id}/a/2", b""), Put(f"{run_id}/b/2", b"")])
    assert [event.kv.key for event in recorder.wait_for_events(2)] == [f"{run_id}/b/1", f"{run_id}/b/2"]


def test_a_watch_without_a_revision_is_refused(store: CoordinationStore, run_id: str) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="start_revision"):
        store.watch(run_id, 0, recorder.on_events, recorder.on_error)


def test_a_cancelled_watch_is_silent(store: CoordinationStore, run_id: str) -> None:
    cancelled, running = Recorder(), Recorder()
    start = store.list_prefix(run_id).revision + 1
    watch = store.watch(run_id, start, cancelled.on_events, cancelled.on_error)
    store.watch(run_id, start, running.on_events, running.on_error)
    store.put(f"{run_id}/key", b"1")
    cancelled.wait_for_events(1)
    watch.cancel()
    watch.cancel()
    store.put(f"{run_id}/key", b"2")
    running.wait_for_events(2)
    assert (len(cancelled.events), cancelled.errors) == (1, [])


def test_cancel_waits_for_the_callback_that_is_running(store: CoordinationStore, run_id: str) -> None:
    entered, may_go = threading.Event(), threading.Event()
    left: list[float] = []

    def on_events(events: Sequence[StoreEvent]) -> None:
        entered.set()
        may_go.wait(PATIENCE_S)
        left.append(time.monotonic())

    watch = store.watch(run_id, store.list_prefix(run_id).revision + 1, on_events, lambda error: None)
    store.put(f"{run_id}/key", b"1")
    assert entered.wait(PATIENCE_S)
    threading.Timer(0.05, may_go.set).start()
    watch.cancel()
    assert left, "cancel returned while a callback was running"


def test_a_slow_callback_holds_up_neither_writers_nor_other_watches(store: CoordinationStore, run_id: str) -> None:
    may_go = threading.Event()

    def on_events(events: Sequence[StoreEvent]) -> None:
        may_go.wait(PATIENCE_S)

    slow = store.watch(run_id, store.list_prefix(run_id).revision + 1, on_events, lambda error: None)
    recorder = watch_from_now(store, run_id)
    for n in range(5):
        store.put(f"{run_id}/key", str(n).encode())
    recorder.wait_for_events(5)
    may_go.set()
    slow.cancel()


def test_a_callback_may_call_the_store(store: CoordinationStore, run_id: str) -> None:
    seen: list[KeyValue | None] = []
    done = threading.Event()

    def on_events(events: Sequence[StoreEvent]) -> None:
        seen.append(store.get(events[0].kv.key))
        done.set()

    store.watch(run_id, store.list_prefix(run_id).revision + 1, on_events, lambda error: None)
    store.put(f"{run_id}/key", b"1")
    assert done.wait(PATIENCE_S)
    assert seen[0] is not None


def test_a_callback_that_raises_ends_its_watch_with_one_error(store: CoordinationStore, run_id: str) -> None:
    recorder = Recorder()
    calls: list[int] = []

    def on_events(events: Sequence[StoreEvent]) -> None:
        calls.append(len(events))
        raise KeyError("a mistake")

    store.watch(run_id, store.list_prefix(run_id).revision + 1, on_events, recorder.on_error)
    healthy = watch_from_now(store, run_id)
    store.put(f"{run_id}/key", b"1")
    assert "a mistake" in str(recorder.wait_for_error())
    store.put(f"{run_id}/key", b"2")
    healthy.wait_for_events(2)
    assert (calls, len(recorder.errors), healthy.errors) == ([1], 1, [])


def test_a_watch_from_a_compacted_revision_fails_and_says_up_to_where(
    backend: Backend, store: CoordinationStore, run_id: str
) -> None:
    revisions = [store.put(f"{run_id}/key", str(n).encode()) for n in range(5)]
    backend.compact(revisions[3])
    late, fresh = Recorder(), Recorder()
    store.watch(run_id, revisions[0], late.on_events, late.on_error)
    store.watch(run_id, revisions[4], fresh.on_events, fresh.on_error)
    error = late.wait_for_error()
    assert isinstance(error, CompactedError)
    assert str(revisions[3]) in str(error)
    store.put(f"{run_id}/key", b"5")
    assert [event.kv.value for event in fresh.wait_for_events(2)] == [b"4", b"5"]
    assert (late.events, len(late.errors), fresh.errors) == ([], 1, [])
    assert read(store, f"{run_id}/key").version == 6


def test_a_running_watch_does_not_mind_a_compaction(backend: Backend, store: CoordinationStore, run_id: str) -> None:
    recorder = watch_from_now(store, run_id)
    backend.compact(store.put(f"{run_id}/key", b"1"))
    store.put(f"{run_id}/key", b"2")
    assert [event.kv.value for event in recorder.wait_for_events(2)] == [b"1", b"2"]
    assert recorder.errors == []


# The end ------------------------------------------------------------------------------------------------------------


def test_a_closed_client_is_silent_and_refuses_calls_while_others_go_on(backend: Backend, run_id: str) -> None:
    closing, staying = backend.client(), backend.client()
    lease = closing.grant_lease(60.0)
    closing.put(f"{run_id}/leased", b"1", lease.lease_id)
    ended, running = watch_from_now(closing, run_id), watch_from_now(staying, run_id)
    closing.close()
    closing.close()
    staying.put(f"{run_id}/key", b"1")
    running.wait_for_events(1)
    assert (ended.events, ended.errors) == ([], [])
    assert read(staying, f"{run_id}/leased").value == b"1", "a lease outlives its client"
    attempts: list[Callable[[], object]] = [
        lambda: closing.get("key"),
        lambda: closing.put(f"{run_id}/key", b"2"),
        lambda: closing.keep_alive(lease.lease_id),
        lambda: closing.watch(run_id, 1, ended.on_events, ended.on_error),
    ]
    for attempt in attempts:
        with pytest.raises(StoreUnavailableError, match="closed"):
            attempt()
    staying.revoke_lease(lease.lease_id)


def test_no_thread_of_a_watch_is_left_after_close(backend: Backend, run_id: str) -> None:
    client = backend.client()
    watch_from_now(client, f"{run_id}/one")
    watch_from_now(client, f"{run_id}/two")

    def mine() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if run_id in thread.name]

    assert len(mine()) == 2
    client.close()
    wait_until(lambda: not mine(), what="the watch threads end")
