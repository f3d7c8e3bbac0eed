"""What the store in memory has beyond the conformance suite: faults, time, several clients."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pytest

from tests.memory_store import MemoryStore
from tests.waiting import wait_until
from torchelastic.rendezvous.store import (
    Compare,
    LeaseLostError,
    Put,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    Target,
)
from torchelastic.testing.clock import FakeClock

PATIENCE_S = 60.0


class Watched:
    def __init__(self, store: MemoryStore, prefix: str = "") -> None:
        self.batches: queue.Queue[Sequence[StoreEvent]] = queue.Queue()
        self.errors: queue.Queue[StoreError] = queue.Queue()
        revision = store.list_prefix(prefix).revision + 1
        self.watch = store.watch(prefix, revision, self.batches.put, self.errors.put)


def test_an_empty_store_is_at_revision_one_as_etcd_is() -> None:
    store = MemoryStore(FakeClock())
    assert store.list_prefix("").revision == 1
    assert store.put("key", b"1") == 2


def test_what_changes_nothing_makes_no_revision() -> None:
    store = MemoryStore(FakeClock())
    assert store.delete("nothing") == 1
    assert store.txn([], []).revision == 1
    assert store.txn([Compare("key", Target.VERSION, 1)], [Put("key", b"1")]).revision == 1
    store.revoke_lease(store.grant_lease(5.0).lease_id)
    assert store.list_prefix("").revision == 1


def test_a_lease_ends_when_its_time_is_over_and_not_before() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lease = store.grant_lease(10.0)
    store.put("key", b"1", lease.lease_id)
    clock.advance(9.999)
    assert store.get("key") is not None
    clock.advance(0.001)
    assert store.get("key") is None


def test_expire_due_ends_leases_without_a_call_and_tells_the_watches() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lease = store.grant_lease(10.0)
    store.put("key", b"1", lease.lease_id)
    watched = Watched(store)
    clock.advance(10.0)
    store.expire_due()
    (event,) = watched.batches.get(timeout=PATIENCE_S)
    assert event.kv.key == "key"


def test_with_a_real_clock_a_lease_ends_by_itself_and_the_thread_with_the_last_lease() -> None:
    store = MemoryStore()
    before = set(threading.enumerate())  # of stores that other tests have left open

    def timers() -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in new if thread.name == "memory-store-leases"]

    assert timers() == []
    lease = store.grant_lease(1.0)
    store.put("key", b"1", lease.lease_id)
    watched = Watched(store)
    assert len(timers()) == 1
    (event,) = watched.batches.get(timeout=PATIENCE_S)
    assert event.kv.key == "key"
    wait_until(lambda: timers() == [], what="the timer ends with the last lease")
    store.grant_lease(3600.0)
    assert len(timers()) == 1
    store.close()
    wait_until(lambda: timers() == [], what="the timer ends with the last client")


def test_while_stopped_nothing_works_and_no_lease_expires() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lease = store.grant_lease(10.0)
    store.put("key", b"1", lease.lease_id)
    watched = Watched(store)
    store.stop()
    assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    attempts: list[Callable[[], object]] = [
        lambda: store.get("key"),
        lambda: store.list_prefix(""),
        lambda: store.put("key", b"2"),
        lambda: store.grant_lease(1.0),
        lambda: store.keep_alive(lease.lease_id),
        lambda: store.revoke_lease(lease.lease_id),
        lambda: store.watch("", 1, print, print),
    ]
    for attempt in attempts:
        with pytest.raises(StoreUnavailableError, match="stopped"):
            attempt()
    clock.advance(3600.0)
    store.expire_due()
    store.start()
    assert store.get("key") is not None, "a lease has its full time again when the server is back, as with etcd"
    clock.advance(10.0)
    assert store.get("key") is None
    assert watched.errors.empty()


def test_a_watch_can_go_on_where_the_outage_cut_it_off() -> None:
    store = MemoryStore(FakeClock())
    last = store.put("key", b"1")
    watched = Watched(store)
    store.stop()
    watched.errors.get(timeout=PATIENCE_S)
    store.start()
    store.put("key", b"2")
    batches: queue.Queue[Sequence[StoreEvent]] = queue.Queue()
    store.watch("", last + 1, batches.put, print)
    assert batches.get(timeout=PATIENCE_S)[0].kv.value == b"2"


def test_lost_data_takes_keys_leases_and_revisions_along() -> None:
    store = MemoryStore(FakeClock())
    lease = store.grant_lease(10.0)
    store.put("key", b"1", lease.lease_id)
    watched = Watched(store)
    store.lose_data()
    assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    assert store.list_prefix("") == MemoryStore(FakeClock()).list_prefix("")
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.lease_id)
    assert store.grant_lease(10.0).lease_id != lease.lease_id, "an old lease must not come alive again"


def test_a_client_that_closes_ends_its_own_watches_only() -> None:
    store = MemoryStore(FakeClock())
    other = store.connect()
    mine, theirs = Watched(store), Watched(other)
    other.close()
    store.connect().put("key", b"1")
    assert mine.batches.get(timeout=PATIENCE_S)[0].kv.key == "key"
    assert (theirs.batches.empty(), theirs.errors.empty()) == (True, True)
    with pytest.raises(StoreUnavailableError, match="closed"):
        other.get("key")
