"""`torchelastic drain`: whom it asks, what it says of whom it does not know, what it takes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.memory_store import MemoryStore
from tests.waiting import wait_until
from torchelastic.launch.drain import choose, drained
from torchelastic.launch.main import main
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, encode_member, encode_round
from torchelastic.usage import UsageError

KEYS = Keys("/torchelastic/test")
A0, A1, B0 = Member("a-0", "a"), Member("a-1", "a"), Member("b-0", "b")


def store_with(*members: Member) -> MemoryStore:
    store = MemoryStore()
    for member in members:
        store.put(KEYS.member(member.member_id), encode_member(member))
    return store


def requests(store: MemoryStore) -> list[str]:
    return [kv.key.removeprefix(KEYS.drain) for kv in store.list_prefix(KEYS.drain).items]


def in_the_background(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("names", "host", "chosen"),
    [
        (["a-1"], None, [A1]),
        ([], "a", [A0, A1]),
        (["b-0"], "a", [A0, A1, B0]),
    ],
)
def test_members_are_chosen_by_name_and_by_host(names: list[str], host: str | None, chosen: list[Member]) -> None:
    found = choose(store_with(A0, A1, B0), KEYS, names, host)
    assert [member.member_id for member in found] == [member.member_id for member in chosen]


@pytest.mark.parametrize(
    ("names", "host", "complaint"),
    [
        (["a-7"], None, "no member is called a-7"),
        (["a-0", "gone"], None, "no member is called gone"),
        ([], "c", "no member is on a host called c"),
        ([], None, "give a member, or --host HOST"),
    ],
)
def test_what_is_unknown_is_named_and_what_is_known_listed(names: list[str], host: str | None, complaint: str) -> None:
    store = store_with(A0, B0, Member("gone", "c", departed=True))
    with pytest.raises(UsageError, match=complaint) as caught:
        choose(store, KEYS, names, host)
    assert str(caught.value).endswith(":\n  a-0  on host a\n  b-0  on host b")


def test_a_run_without_members_is_named() -> None:
    with pytest.raises(UsageError, match="nobody is in run 'test'"):
        choose(store_with(), KEYS, ["a-0"], None)


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf"])
def test_a_timeout_that_makes_no_sense_is_refused_before_anybody_is_asked(
    timeout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "x", "--connect-timeout", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["drain", *place, "--host", "a", "--timeout", timeout])
    assert ended.value.code == 2
    assert f"--timeout {timeout}: give seconds, 0 or more" in capsys.readouterr().err


def test_it_returns_when_all_have_left_whether_their_record_says_so_or_is_gone() -> None:
    store = store_with(A0, B0)
    results: list[bool] = []
    command = in_the_background(lambda: results.append(drained(store.connect(), KEYS, [A0, B0], 60.0)))
    wait_until(lambda: requests(store) == ["a/a-0", "b/b-0"])
    store.put(KEYS.member("a-0"), encode_member(replace(A0, departed=True)))
    command.join(0.5)
    assert command.is_alive(), "one is still there"
    store.delete(KEYS.member("b-0"))
    command.join(20.0)
    assert results == [True]
    assert requests(store) == []


def test_a_request_that_nobody_takes_up_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    store = store_with(A0)
    assert not drained(store, KEYS, [A0], 0.2)
    assert requests(store) == []
    assert "not within 0.2 s: a-0" in capsys.readouterr().err


def test_who_is_in_a_run_that_has_ended_counts_as_gone() -> None:
    store = store_with(A0)
    store.put(KEYS.round, encode_round(Round(3, RoundState.CLOSED, ("a-0",), "h:1")))
    assert drained(store, KEYS, [A0], 20.0)
