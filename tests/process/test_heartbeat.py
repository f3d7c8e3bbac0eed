"""Signs of life over a real store: who gives them is not silent, who has stopped is, and so is a dead store."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.older_torch import needs_released_interpreter
from tests.process.fork_server import fork_server, started
from tests.waiting import is_gone, pause, wait_until
from torchelastic.group.store_mailbox import StoreMailbox
from torchelastic.p2p.heartbeat import BEAT_S, Heartbeat


def make_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def client_of(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=20), wait_for_workers=False)


def test_a_rank_that_gives_no_sign_is_the_silent_one() -> None:
    server = make_store()
    ranks = [Heartbeat(client_of(server), rank, 3) for rank in range(3)]
    assert ranks[0].silent_s() == {1: 0.0, 2: 0.0}, "before anybody asked nobody was silent"
    wait_until(lambda: server.check([f"heartbeat/{rank}" for rank in range(3)]))
    ranks[1].end()
    wait_until(lambda: ranks[0].silent_s()[1] > 4 * BEAT_S)
    assert ranks[0].silent_s()[2] < ranks[0].silent_s()[1]
    ranks[0].rest()
    assert ranks[0].silent_s() == {1: 0.0, 2: 0.0}, "a new question counts anew"
    for rank in ranks:
        rank.end()


def test_who_was_never_heard_of_is_silent_too() -> None:
    server = make_store()
    first = Heartbeat(client_of(server), 0, 2)
    first.silent_s()
    wait_until(lambda: first.silent_s()[1] > 2 * BEAT_S)
    first.end()


class DeadStore:
    """Answers nothing, like that of a rank 0 that is stopped."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def set(self, _key: str, _value: str) -> None:
        while self.clock[0] < 100.0:
            time.sleep(0.01)


def test_a_store_that_does_not_answer_is_rank_0s_silence_and_nobody_elses() -> None:
    clock = [0.0]
    third = Heartbeat(DeadStore(clock), 2, 3, lambda: clock[0])  # type: ignore[arg-type]
    third.silent_s()
    clock[0] = 5.0
    assert third.silent_s() == {0: 5.0, 1: 0.0}
    clock[0] = 100.0
    third.end()


class Unreachable:
    """A store to which a second connection takes forever, like that of a rank 0 whose host is gone."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def clone(self) -> None:
        self.is_asked.set()
        time.sleep(60.0)
        raise RuntimeError("it is gone")


def test_a_round_whose_store_cannot_be_reached_holds_no_sign_of_the_next_round_up() -> None:
    gone = Unreachable()
    old = Heartbeat(gone, 1, 2)  # type: ignore[arg-type]
    assert gone.is_asked.wait(20.0)
    old.end()
    server = make_store()
    new = Heartbeat(client_of(server), 1, 2)
    wait_until(lambda: server.check(["heartbeat/1"]))
    new.end()


def test_a_group_whose_store_cannot_be_reached_holds_no_note_of_the_next_group_up() -> None:
    gone = Unreachable()

    def post() -> None:
        with suppress(RuntimeError):
            StoreMailbox(gone).post("key", b"")  # type: ignore[arg-type]

    threading.Thread(target=post, daemon=True).start()
    assert gone.is_asked.wait(20.0)
    server = make_store()
    notes = StoreMailbox(client_of(server))
    began_s = time.monotonic()
    notes.post("key", b"words")
    assert notes.look("key") == b"words"
    assert time.monotonic() - began_s < 20.0


def serve(end: Connection) -> None:
    store = make_store()
    end.send(store.port)
    time.sleep(600)


@contextmanager
def server_and_client(timeout_s: float = 2.0) -> Iterator[tuple[int, TCPStore]]:
    """A store's server in a process of its own, which can be stopped: its pid, and a connection to it."""
    here, there = fork_server().Pipe()
    server = started(serve, there)
    try:
        assert here.poll(20.0)
        port, pid = here.recv(), server.pid
        assert pid is not None
        yield pid, TCPStore("127.0.0.1", port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    finally:
        server.kill()


@needs_released_interpreter
@pytest.mark.parametrize("is_connected", [True, False])
def test_nobody_waits_for_notes_of_a_group_that_has_ended(is_connected: bool) -> None:
    with server_and_client() as (server, of_group):
        notes = StoreMailbox(PrefixStore("round", of_group), answer_s=600.0)
        if is_connected:
            notes.post("key", b"words")
        pause([server])
        began_s = time.monotonic()
        notes.end(0.2)
        with pytest.raises(RuntimeError):
            notes.look("key")
        assert time.monotonic() - began_s < 20.0, "who waited was freed"
        os.kill(server, signal.SIGCONT)
        with pytest.raises(RuntimeError, match="aborted"):
            notes.post("key", b"new words")


@pytest.mark.parametrize("is_connected", [True, False])
def test_notes_do_not_wait_for_a_store_whose_host_is_silent_and_reach_it_when_it_is_back(is_connected: bool) -> None:
    """A stopped process stands for a host without power: the kernel takes what is sent, and nobody answers."""
    with server_and_client() as (server, of_group):
        notes = StoreMailbox(PrefixStore("round", of_group), answer_s=0.5)
        if is_connected:
            notes.post("key", b"words")
        pause([server])
        began_s = time.monotonic()
        with pytest.raises(RuntimeError):
            notes.look("key")
        assert time.monotonic() - began_s < 10.0, "and not until the kernel gives up"
        os.kill(server, signal.SIGCONT)

        def is_posted() -> bool:  # an answer within half a second is much to ask of a busy machine
            with suppress(RuntimeError):
                notes.post("key", b"new words")
                return notes.look("key") == b"new words"
            return False

        assert wait_until(is_posted)
        assert of_group.check(["round/note/key"]), "the connection of the group was left alone"


def test_notes_do_not_wait_for_a_killed_rank_0_that_still_listens_when_its_connections_have_ended() -> None:
    """As the kernel takes a process apart; torch, which then is refused, would try for the time-out of the store."""
    with server_and_client(timeout_s=10.0) as (server, of_group):
        notes = StoreMailbox(of_group)
        notes.post("key", b"words")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            notes.look("key")
        wait_until(lambda: is_gone(server))
        listener = socket.create_server(("127.0.0.1", of_group.port))
        threading.Timer(0.3, listener.close).start()
        began_s = time.monotonic()
        with pytest.raises(RuntimeError, match="cannot be reached"):
            notes.post("key", b"new words")
        assert time.monotonic() - began_s < 8.0
