"""EtcdStore where the network, the server or the user is not as it should be."""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.proxy import Proxy
from tests.waiting import pause
from torchelastic.rendezvous import etcd_connection
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Put,
    StoreAccessError,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    Target,
)
from torchelastic.testing.etcd import python_protobuf_env

PATIENCE_S = 60.0
PASSWORD = "hunter2-must-stay-secret"
AGENT = Credentials(user="agent", password=PASSWORD)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port where connections are refused: bound, so that nobody else gets it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class Watched:
    """A watch whose callbacks fill queues."""

    def __init__(self, store: CoordinationStore, prefix: str, start_revision: int) -> None:
        self.events: queue.Queue[StoreEvent] = queue.Queue()
        self.errors: queue.Queue[StoreError] = queue.Queue()
        self.watch = store.watch(prefix, start_revision, self._on_events, self.errors.put)

    def _on_events(self, events: Sequence[StoreEvent]) -> None:
        for event in events:
            self.events.put(event)


@pytest.fixture
def proxy(etcd: EtcdServer) -> Iterator[Proxy]:
    with Proxy((etcd.host, etcd.port)) as made:
        yield made


# Outages ------------------------------------------------------------------------------------------------------------


def test_a_stopped_server_is_reported_in_time_and_works_again_when_it_goes_on(own_etcd: EtcdServer) -> None:
    store = EtcdStore([(own_etcd.host, own_etcd.port)], timeout_s=1.0)
    watched = Watched(store, "key", store.put("key", b"1") + 1)
    pause([own_etcd.pid])
    try:
        started_s = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=own_etcd.endpoint):
            store.get("key")
        assert time.monotonic() - started_s < 2.0
        assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    finally:
        os.kill(own_etcd.pid, signal.SIGCONT)
    kv = store.get("key")
    assert kv is not None
    assert kv.value == b"1"
    store.close()
    assert watched.errors.empty(), "an error is reported once"


def test_a_watch_notices_a_silent_server_though_nobody_calls_and_the_next_call_knows(
    own_etcd: EtcdServer, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ten_times_faster = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = [(k, v // 10 if k in ten_times_faster else v) for k, v in etcd_connection._CHANNEL_OPTIONS]
    monkeypatch.setattr(etcd_connection, "_CHANNEL_OPTIONS", options)
    store = EtcdStore([(own_etcd.host, own_etcd.port), (etcd.host, etcd.port)], timeout_s=20.0)
    watched = Watched(store, "key", store.put("key", b"1"))
    watched.events.get(timeout=PATIENCE_S)
    pause([own_etcd.pid])
    try:
        assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
        started_s = time.monotonic()
        store.get("key")
        assert time.monotonic() - started_s < 5.0, "the silent server was asked again, for its half of the time"
    finally:
        os.kill(own_etcd.pid, signal.SIGCONT)
    store.close()


def test_a_client_finds_its_server_again_after_a_crash_and_misses_nothing(own_etcd: EtcdServer) -> None:
    store = EtcdStore([(own_etcd.host, own_etcd.port)], timeout_s=2.0)
    first = store.put("key", b"1")
    watched = Watched(store, "key", first + 1)
    own_etcd.kill()
    assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        store.list_prefix("key")
    own_etcd.restart()
    store.put("key", b"2")
    again = Watched(store, "key", first + 1)
    assert again.events.get(timeout=PATIENCE_S).kv.value == b"2"
    store.close()
    assert (watched.errors.empty(), again.errors.empty(), watched.events.empty()) == (True, True, True)


def test_a_server_that_lost_its_data_ends_the_watches_and_starts_at_lower_revisions(own_etcd: EtcdServer) -> None:
    store = EtcdStore([(own_etcd.host, own_etcd.port)], timeout_s=2.0)
    for n in range(5):
        before = store.put("key", str(n).encode())
    watched = Watched(store, "key", before + 1)
    own_etcd.restart(lose_data=True)
    assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreUnavailableError)
    listing = store.list_prefix("")
    assert listing.items == ()
    assert listing.revision < before
    store.close()


def test_a_client_uses_no_cpu_while_it_waits_even_when_its_server_is_gone(own_etcd: EtcdServer) -> None:
    script = """
import sys, time
from torchelastic.rendezvous.etcd import EtcdStore
store = EtcdStore([("127.0.0.1", int(sys.argv[1]))])
for n in range(2):
    store.watch(f"prefix-{n}", store.list_prefix("").revision + 1, lambda events: None, lambda error: None)
for _ in range(2):
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    time.sleep(1.5)
    print((time.process_time() - before) / 1.5, flush=True)
"""
    command = [sys.executable, "-c", script, str(own_etcd.port)]
    client = subprocess.Popen(
        command, env=python_protobuf_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdin is not None
    assert client.stdout is not None
    shares = []
    for kill_first in (False, True):
        assert client.stdout.readline() == "ready\n"
        if kill_first:
            own_etcd.kill()
        client.stdin.write("go\n")
        client.stdin.flush()
        shares.append(float(client.stdout.readline()))
    assert client.wait(PATIENCE_S) == 0
    assert max(shares) < 0.05, f"share of a core with and without the server: {shares}"


# Several endpoints --------------------------------------------------------------------------------------------------


def test_the_next_endpoint_serves_when_the_first_refuses(etcd: EtcdServer, dead_port: int, run_id: str) -> None:
    store = EtcdStore([("127.0.0.1", dead_port), (etcd.host, etcd.port)])
    revision = store.put(f"{run_id}/key", b"1")
    watched = Watched(store, run_id, revision)
    assert watched.events.get(timeout=PATIENCE_S).kv.value == b"1"
    store.close()


def test_the_next_endpoint_serves_when_the_first_is_silent(etcd: EtcdServer, run_id: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog connects, and then nothing comes
        store = EtcdStore([silent.getsockname()[:2], (etcd.host, etcd.port)], timeout_s=2.0)
        started_s = time.monotonic()
        store.put(f"{run_id}/key", b"1")
        assert time.monotonic() - started_s < 2.0
        store.close()


def test_the_next_endpoint_serves_when_the_first_dies(etcd: EtcdServer, own_etcd: EtcdServer, run_id: str) -> None:
    store = EtcdStore([(own_etcd.host, own_etcd.port), (etcd.host, etcd.port)])
    other = EtcdStore([(etcd.host, etcd.port)])
    store.put(f"{run_id}/key", b"first")
    other.put(f"{run_id}/key", b"second")
    own_etcd.kill()
    kv = store.get(f"{run_id}/key")
    assert kv is not None
    assert kv.value == b"second"
    store.close()
    other.close()


def test_a_read_that_got_no_answer_is_repeated_at_the_next_endpoint(
    etcd: EtcdServer, proxy: Proxy, run_id: str
) -> None:
    store = EtcdStore([proxy.endpoint, (etcd.host, etcd.port)], timeout_s=2.0)
    store.put(f"{run_id}/key", b"1")
    proxy.lose_answer_of(lambda _sent: True)
    kv = store.get(f"{run_id}/key")
    assert kv is not None
    assert kv.value == b"1"
    store.close()


def test_a_write_whose_answer_was_lost_is_reported_and_not_repeated(
    etcd: EtcdServer, proxy: Proxy, run_id: str
) -> None:
    store = EtcdStore([proxy.endpoint, (etcd.host, etcd.port)], timeout_s=1.0)
    assert store.get(f"{run_id}/key") is None
    proxy.lose_answer_of(lambda _sent: True)
    absent = Compare(f"{run_id}/key", Target.VERSION, 0)
    with pytest.raises(StoreUnavailableError, match="may or may not"):
        store.txn([absent], [Put(f"{run_id}/key", b"mine")])
    kv = store.get(f"{run_id}/key")
    assert kv is not None, "this test's proxy did carry the request"
    assert (kv.value, kv.version) == (b"mine", 1)
    store.close()


def test_threads_that_call_during_a_failover_all_get_their_answer(
    etcd: EtcdServer, own_etcd: EtcdServer, run_id: str
) -> None:
    store = EtcdStore([(own_etcd.host, own_etcd.port), (etcd.host, etcd.port)])
    store.get("key")
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                store.get(f"{run_id}/key")
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    own_etcd.kill()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    store.close()


def test_an_error_names_every_endpoint_and_why_it_did_not_serve(dead_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_port = silent.getsockname()[1]
        store = EtcdStore([("127.0.0.1", dead_port), ("127.0.0.1", silent_port)], timeout_s=1.0)
        with pytest.raises(StoreUnavailableError) as caught:
            store.get("key")
    assert f"127.0.0.1:{dead_port}: " in str(caught.value)
    assert "refused" in str(caught.value)
    assert f"127.0.0.1:{silent_port}: no answer in time" in str(caught.value)
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.watch("key", 1, lambda events: None, lambda error: None)
    assert time.monotonic() - started_s < 2.0
    store.close()


# Users and secrets --------------------------------------------------------------------------------------------------


def _ask(server: EtcdServer, path: str, body: dict[str, object]) -> None:
    url = f"http://{server.endpoint}/v3/auth/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=5) as response:
        response.read()


@pytest.fixture
def guarded_etcd(own_etcd: EtcdServer) -> EtcdServer:
    """A server with authentication: `agent` may read and write under "mine/"."""
    for user in ("root", "agent"):
        _ask(own_etcd, "user/add", {"name": user, "password": PASSWORD})
        _ask(own_etcd, "role/add", {"name": user})
        _ask(own_etcd, "user/grant", {"user": user, "role": user})
    key, end = (base64.b64encode(text).decode() for text in (b"mine/", b"mine0"))
    _ask(own_etcd, "role/grant", {"name": "agent", "perm": {"permType": "READWRITE", "key": key, "range_end": end}})
    _ask(own_etcd, "enable", {})
    return own_etcd


def test_a_user_with_permission_gets_in_and_stays_in_after_the_server_forgot_its_token(
    guarded_etcd: EtcdServer,
) -> None:
    store = EtcdStore([(guarded_etcd.host, guarded_etcd.port)], credentials=AGENT)
    watched = Watched(store, "mine/", store.put("mine/key", b"1"))
    assert watched.events.get(timeout=PATIENCE_S).kv.value == b"1"
    quiet = EtcdStore([(guarded_etcd.host, guarded_etcd.port)], credentials=AGENT)
    quiet.put("mine/quiet", b"1")  # no watch tells this client that the server was away
    guarded_etcd.restart()
    quiet.put("mine/quiet", b"2")
    quiet.close()
    lease = store.grant_lease(60.0)
    assert store.keep_alive(lease.lease_id) == lease.ttl_s
    store.put("mine/key", b"2", lease.lease_id)
    kv = store.get("mine/key")
    assert kv is not None
    assert kv.version == 2
    store.close()


def test_what_a_user_may_not_do_is_refused_and_not_tried_again(guarded_etcd: EtcdServer) -> None:
    store = EtcdStore([(guarded_etcd.host, guarded_etcd.port)], credentials=AGENT)
    with pytest.raises(StoreAccessError, match="permission denied"):
        store.get("other/key")
    with pytest.raises(StoreAccessError, match="permission denied"):
        store.put("other/key", b"1")
    watched = Watched(store, "other/", 2)
    assert isinstance(watched.errors.get(timeout=PATIENCE_S), StoreAccessError)
    assert store.get("mine/key") is None
    store.close()


def test_a_wrong_password_and_no_password_are_refused(guarded_etcd: EtcdServer) -> None:
    endpoint = (guarded_etcd.host, guarded_etcd.port)
    for store in (EtcdStore([endpoint], credentials=replace(AGENT, password="wrong")), EtcdStore([endpoint])):
        with pytest.raises(StoreAccessError, match=guarded_etcd.endpoint):
            store.get("mine/key")
        store.close()


def test_the_password_appears_in_no_error_log_or_repr(
    guarded_etcd: EtcdServer, dead_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    for port, user in ((guarded_etcd.port, "nobody"), (guarded_etcd.port, "agent"), (dead_port, "agent")):
        store = EtcdStore([("127.0.0.1", port)], timeout_s=1.0, credentials=replace(AGENT, user=user))
        with pytest.raises(StoreError) as caught:
            store.get("other/key")
        texts += [repr(store), repr(caught.value), *traceback.format_exception(caught.value)]
        store.close()
    texts += [repr(AGENT), caplog.text, *capfd.readouterr()]
    assert len(texts) > 10
    assert PASSWORD not in "\n".join(texts)


# Arguments ----------------------------------------------------------------------------------------------------------


def test_an_endpoint_that_is_given_twice_is_tried_once_so_that_the_one_behind_it_gets_its_turn() -> None:
    assert repr(EtcdStore([("::1", 1), ("[::1]", 1), ("host", 3)])) == "EtcdStore([::1]:1,host:3)"


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = EtcdStore([("127.0.0.1", 2379)], credentials=Credentials(ca_cert=str(tmp_path / "missing.pem")))
    with pytest.raises(StoreAccessError, match=r"missing\.pem"):
        store.get("key")


def test_the_rendezvous_package_loads_neither_torch_nor_grpc_nor_protobuf() -> None:
    script = (
        "import sys, torchelastic.rendezvous; torchelastic.rendezvous.EtcdServer; dir(torchelastic.rendezvous);"
        "print(sorted({'torch', 'grpc', 'etcd3', 'google.protobuf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("[]\n", "")
