"""EtcdStore on an etcd of three members, some of which fail."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.server import find_etcd_binary
from torchelastic.rendezvous.store import StoreError, StoreEvent, StoreUnavailableError

PATIENCE_S = 20.0


class Cluster:
    """Three members; `stop` and `resume` by SIGSTOP and SIGCONT."""

    def __init__(self, folder: Path) -> None:
        with _free_ports(6) as ports:
            self.clients, peers = ports[:3], ports[3:]
        everybody = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(peers))
        self._members = [
            subprocess.Popen(
                dies_with_parent(
                    [
                        str(find_etcd_binary()),
                        *("--name", f"m{n}", "--data-dir", str(folder / f"m{n}"), "--log-level", "error"),
                        *("--heartbeat-interval", "50", "--election-timeout", "300"),  # to lose a leader soon
                        *("--listen-client-urls", client, "--advertise-client-urls", client),
                        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                        *("--initial-cluster", everybody),
                    ]
                )
            )
            for n, (client, peer) in enumerate(
                (f"http://127.0.0.1:{self.clients[n]}", f"http://127.0.0.1:{peers[n]}") for n in range(3)
            )
        ]

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", port) for port in self.clients]

    def stop(self, *members: int) -> None:
        for n in members:
            os.kill(self._members[n].pid, signal.SIGSTOP)

    def resume(self, *members: int) -> None:
        for n in members:
            os.kill(self._members[n].pid, signal.SIGCONT)

    def kill(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()


class _free_ports:  # noqa: N801 - used as a function
    def __init__(self, count: int) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]

    def __enter__(self) -> list[int]:
        return [one.getsockname()[1] for one in self._sockets]

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.kill()


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
