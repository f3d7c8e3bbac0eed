"""A real etcd that is full: the commands of docs/troubleshooting.md, and watching a run that uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_doctor_etcd import MIB, NOBODY, url_of
from torchelastic.doctor.etcd_facts import open_store
from torchelastic.rendezvous.records import Keys, Round, RoundState, encode_round
from torchelastic.rendezvous.server import EtcdServer, find_etcd_binary
from torchelastic.rendezvous.store import CoordinationStore, Put, StoreError
from torchelastic.testing import running_etcd

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def commands() -> str:
    blocks: list[str] = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    (block,) = (text for text in blocks if "compact" in text)
    return block


def fill_with_history(store: CoordinationStore) -> None:
    for _ in range(30):
        store.txn((), (Put("/the/same/key", os.urandom(MIB)),))


@pytest.fixture
def full() -> Iterator[tuple[EtcdServer, CoordinationStore]]:
    """An etcd that takes no writes, and in which run `mine` has three rounds behind it."""
    with running_etcd(options=("--quota-backend-bytes", str(8 * MIB))) as server:
        store, url = open_store(url_of(server), NOBODY), url_of(server, run_id="mine")
        try:
            store.txn((), (Put(Keys(url.root).round, encode_round(Round(number=3, state=RoundState.CLOSED))),))
            with pytest.raises(StoreError, match="space exceeded"):
                fill_with_history(store)
            yield server, store
        finally:
            store.close()


def test_an_etcd_whose_history_fills_it_takes_writes_again_after_the_commands_of_the_page(
    full: tuple[EtcdServer, CoordinationStore],
) -> None:
    server, store = full
    tools = find_etcd_binary().parent
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": server.endpoint,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    store.txn((), (Put("/the/same/key", b"small"),))
    assert [item.value for item in store.list_prefix("/the/same/key").items] == [b"small"]


def test_a_run_whose_etcd_is_full_can_be_watched(full: tuple[EtcdServer, CoordinationStore]) -> None:
    endpoint = full[0].endpoint
    command = [sys.executable, "-m", "torchelastic", "status", "--rdzv-endpoint", endpoint, "--rdzv-id", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "round 3" in done.stdout) == (0, True), done.stdout + done.stderr
