"""EtcdStore on an etcd of three members, some of which fail."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.etcd_cluster import Cluster, running_cluster
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.store import StoreError, StoreEvent, StoreUnavailableError

PATIENCE_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as made:
        yield made


def connect(cluster: Cluster, timeout_s: float) -> EtcdStore:
    """A client, as soon as the cluster has a leader."""
    store = EtcdStore(cluster.endpoints, timeout_s=timeout_s)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            store.get("key")
        except StoreUnavailableError:
            assert time.monotonic() < deadline_s, "the cluster did not come up"
            time.sleep(0.1)
        else:
            return store


def member_of(store: EtcdStore, cluster: Cluster) -> int:
    """Which member the client is connected to."""
    current = store._failover._current
    assert current is not None
    return cluster.clients.index(int(current.endpoint.rpartition(":")[2]))


def test_a_watch_goes_on_at_another_member_and_misses_nothing(cluster: Cluster) -> None:
    store = connect(cluster, timeout_s=1.5)
    events: queue.Queue[Sequence[StoreEvent]] = queue.Queue()
    errors: queue.Queue[StoreError] = queue.Queue()
    last = store.put("key", b"1")
    store.watch("key", last, events.put, errors.put)
    assert events.get(timeout=PATIENCE_S)[0].kv.value == b"1"
    mine = member_of(store, cluster)
    other = EtcdStore([one for n, one in enumerate(cluster.endpoints) if n != mine], timeout_s=1.0)
    cluster.stop(mine)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:  # the stopped member may have been the leader: until there is another, nobody can write
        try:
            other.put("key", b"2")
            break
        except StoreUnavailableError:
            assert time.monotonic() < deadline_s
    kv = store.get("key")
    assert kv is not None
    assert kv.value == b"2"
    assert isinstance(errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    store.watch("key", last + 1, events.put, errors.put)
    assert events.get(timeout=PATIENCE_S)[0].kv.value == b"2"
    store.close()
    other.close()
    assert errors.empty()


def test_a_member_that_lost_its_cluster_ends_its_watches_and_serves_again_later(cluster: Cluster) -> None:
    store = connect(cluster, timeout_s=1.5)
    errors: queue.Queue[StoreError] = queue.Queue()
    store.watch("key", store.put("key", b"1"), lambda events: None, errors.put)
    others = [n for n in range(3) if n != member_of(store, cluster)]
    cluster.stop(*others)
    assert "no leader" in str(errors.get(timeout=PATIENCE_S)), "the member answers pings: only etcd can tell"
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        store.get("key")
    assert time.monotonic() - started_s < 4.0
    for _, port in cluster.endpoints:
        assert f"127.0.0.1:{port}" in str(caught.value)
    cluster.resume(*others)
    connect(cluster, timeout_s=1.5).close()
    kv = store.get("key")
    assert kv is not None
    assert kv.value == b"1"
    store.close()
