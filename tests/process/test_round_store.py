"""The store of a round: where it listens, what a cut ends, and a rank 0 that is stopped or gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.process.foreign_connection import Foreign
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.records import NO_ROUND, Round, RoundState
from torchelastic.rendezvous.round_store import SILENT_S, TIMEOUT_S, RoundStore, StoreSilentError
from torchelastic.torch_internals import c10d_types
from torchelastic.torch_internals.c10d_types import TCPStore


@pytest.fixture
def stopped() -> Iterator[str]:
    """The address of a store whose process is stopped: the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_store_of_a_round_listens_at_the_hosts_address_alone_and_its_cut_leaves_other_connections_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Foreign] = []

    class SlowStore(TCPStore):  # another thread comes in between
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            opened.append(Foreign())

    store_of_round = RoundStore()
    address = store_of_round.listen("127.0.0.1")
    port = int(address.rsplit(":", 1)[1])
    listening = {
        entry.laddr.ip
        for entry in psutil.Process().net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
    monkeypatch.setattr(c10d_types, "TCPStore", SlowStore)
    store = store_of_round.connect(Round(store_address=address), lambda: NO_ROUND)
    store.set("key", "value")
    assert store.get("key") == b"value"
    store_of_round.interrupt()
    with pytest.raises(RuntimeError):
        store.get("another key")
    assert [foreign.is_alive() for foreign in opened] == [True]


def test_a_stopped_rank_0_is_noticed_after_some_seconds(stopped: str) -> None:
    round_ = Round(number=7, state=RoundState.RUNNING, store_address=stopped)
    began_s = time.monotonic()
    with pytest.raises(StoreSilentError, match=rf"round 7 at {stopped} took the connection and was silent"):
        RoundStore().connect(round_, lambda: round_)
    assert SILENT_S <= time.monotonic() - began_s < TIMEOUT_S / 2


def test_who_comes_to_a_stopped_rank_0_gives_up_at_once_when_the_round_is_no_more(stopped: str) -> None:
    round_ = Round(number=7, state=RoundState.RUNNING, store_address=stopped)
    broken = Round(number=7, state=RoundState.BROKEN, store_address=stopped, because="rank 0 made no progress")
    store, present = RoundStore(), [round_]

    def breaks() -> None:
        port = int(stopped.rsplit(":", 1)[1])
        while not any(one.raddr and one.raddr.port == port for one in psutil.Process().net_connections("tcp")):
            time.sleep(0.01)
        present[0] = broken
        while connecting.is_set():  # as often as the agent tells of it
            store.sees(broken)
            time.sleep(0.01)

    connecting = threading.Event()
    connecting.set()
    agent = threading.Thread(target=breaks)
    agent.start()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 made no progress") as raised:
        store.connect(round_, lambda: present[0])
    took_s = time.monotonic() - began_s
    connecting.clear()
    agent.join()
    assert not isinstance(raised.value, StoreSilentError)
    assert took_s < SILENT_S


def test_a_rank_0_that_has_ended_is_tried_again_until_the_round_is_no_more() -> None:
    (port,) = unused_ports("127.0.0.1")
    round_ = Round(number=7, state=RoundState.RUNNING, store_address=f"127.0.0.1:{port}")
    asked: list[Round] = []

    def present() -> Round:
        asked.append(round_)
        return round_ if len(asked) < 3 else NO_ROUND

    with pytest.raises(RuntimeError, match="was not reached"):
        RoundStore().connect(round_, present)
    assert len(asked) == 3


def test_a_torch_whose_usual_store_takes_no_open_socket_gets_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 has it, with which no group could be formed."""
    made: list[bool] = []

    class Store26(TCPStore):
        def __init__(self, *args: Any, use_libuv: bool = True, **kwargs: Any) -> None:
            made.append(use_libuv)
            if use_libuv:
                raise NotImplementedError("the usual store takes no descriptor")
            super().__init__(*args, **{**kwargs, "use_libuv": use_libuv})

    monkeypatch.setattr(c10d_types, "TCPStore", Store26)
    store = RoundStore()
    address = store.listen("127.0.0.1")
    assert made == [True, False]
    assert store.serves_port(int(address.rpartition(":")[2]))
