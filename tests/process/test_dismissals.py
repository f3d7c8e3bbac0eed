"""Notes to newcomers in the store of a round: found whoever looks, and nobody waits for a rank 0 that is gone."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from torchelastic.join_rules import Dismissal
from torchelastic.p2p.dismissals import ANSWER_S, dismiss, find_dismissal
from torchelastic.rendezvous.records import Round
from torchelastic.torch_internals.c10d_types import TCPStore

#: Nobody else of a group waits longer for one that looks.
BOUND_S = 5.0
BAD = Dismissal("ValueError: the batch cannot be shared", True)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def round_at(port: int, number: int = 2) -> Round:
    return Round(number, roster=("a", "b", "c"), store_address=f"127.0.0.1:{port}")


def test_a_note_is_found_by_the_rank_of_the_round_that_it_is_for(store: TCPStore) -> None:
    dismiss(round_at(store.port), (1, 2), BAD)
    assert [find_dismissal(round_at(store.port), rank, may_wait=False) for rank in range(3)] == [None, BAD, BAD]
    assert find_dismissal(round_at(store.port, 3), 1, may_wait=False) is None


def test_who_has_failed_by_itself_waits_a_moment_for_the_others(store: TCPStore) -> None:
    later = threading.Timer(0.2, dismiss, (round_at(store.port), (1,), BAD))
    later.start()
    assert find_dismissal(round_at(store.port), 1, may_wait=True) == BAD
    later.join()
    assert find_dismissal(round_at(store.port), 2, may_wait=True) is None


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("rank_0", ["ended", "stopped", "ending"])
def test_nobody_waits_for_a_rank_0_that_is_gone(rank_0: str, may_wait: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and answers nothing
        if rank_0 == "ended":
            listening.close()
        elif rank_0 == "ending":
            threading.Thread(target=_take_one_and_close, args=(listening,), daemon=True).start()
        port = _unused_port() if rank_0 == "ended" else int(listening.getsockname()[1])
        began_s = time.monotonic()
        assert find_dismissal(round_at(port), 1, may_wait=may_wait) is None
        dismiss(round_at(port), (1,), BAD)
        assert time.monotonic() - began_s < BOUND_S


def test_a_rank_0_that_is_known_to_be_lost_or_is_so_in_a_moment_is_not_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ending:  # as of a killed process, whose memory is not gone yet
        joined = round_at(int(ending.getsockname()[1]))
        news = [joined]
        threading.Timer(0.03, news.append, [replace(joined, departed=("a",))]).start()
        for now in (lambda: news[-1], lambda: replace(joined, number=3, lost=("a",))):
            began_s = time.monotonic()
            assert find_dismissal(joined, 1, may_wait=False, now=now) is None
            assert time.monotonic() - began_s < ANSWER_S


def test_where_another_one_is_lost_rank_0_is_asked_at_once(store: TCPStore) -> None:
    joined = round_at(store.port)
    dismiss(joined, (1,), BAD)
    assert find_dismissal(joined, 1, may_wait=False, now=lambda: replace(joined, departed=("c",))) == BAD
    assert find_dismissal(joined, 1, may_wait=False, now=lambda: joined) == BAD, "nobody is lost"


def _take_one_and_close(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    listening.close()
    connection.close()


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
