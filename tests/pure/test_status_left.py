"""Hosts that are gone, and events that happen rarely: both stay to be seen."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.memory_store import MemoryStore
from tests.pure.status_runs import NOW_S, a_host, a_run
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.ledger_events import End, LedgerEvent, Save, StoreOutage
from torchelastic.observe.status.event_lines import newest
from torchelastic.observe.status.host_view import KEPT_EVENTS, HostView
from torchelastic.observe.status.run_screen import Screen
from torchelastic.observe.status.run_status import MOST_EVENTS, HostStatus, notes_of
from torchelastic.observe.status.status_format import encode_host, run_to_plain
from torchelastic.observe.status.status_reader import MOST_LEFT, StatusReader, is_known
from torchelastic.rendezvous.records import KeptOut, Keys, Round, RoundState, encode_round
from torchelastic.rendezvous.url import parse_url

URL = parse_url("etcd://etcd-host:2379/job7?min_workers=1&max_workers=4")
KEYS = Keys(URL.root)

# --- hosts ------------------------------------------------------------------------------------------------------------


def put_host(store: MemoryStore, host: str, incarnation: str) -> str:
    key = KEYS.status + incarnation
    store.put(key, encode_host(replace(a_host(host, 0), incarnation=incarnation, journal=f"/logs/{host}")))
    return key


def put_round(store: MemoryStore, *roster: str, lost: tuple[str, ...] = ()) -> None:
    store.put(KEYS.round, encode_round(Round(4, RoundState.RUNNING, roster, lost=lost)))


def test_a_host_that_was_seen_and_is_gone_is_told_of_with_where_its_journal_is() -> None:
    store = MemoryStore()
    put_round(store, "a-0-aaaaaaaa1")
    put_host(store, "a", "aaaaaaaa")
    gone = put_host(store, "b", "bbbbbbbb")
    reader = StatusReader(store, URL, clock=lambda: NOW_S)
    assert reader.read().left == ()
    store.delete(gone)
    for _ in range(3):
        status = reader.read()
        assert [host.host for host in status.hosts] == ["a"]
        [left] = run_to_plain(status)["left"]
        assert (left["host"], left["journal"]) == ("b", "/logs/b")
        assert left["at_s"] > 0
    put_host(store, "b", "bbbbbbbb")
    assert reader.read().left == (), "it is back"


def test_of_hosts_that_come_and_go_all_day_the_newest_are_remembered() -> None:
    store = MemoryStore()
    reader = StatusReader(store, URL, clock=lambda: NOW_S)
    for number in range(200):
        key = put_host(store, f"h{number}", f"{number:08}")
        reader.read()
        store.delete(key)
    left = reader.read().left
    assert len(left) == MOST_LEFT
    assert {host.host for host in left} == {f"h{number}" for number in range(200 - MOST_LEFT, 200)}


def drawn(*left: HostStatus, state: RoundState = RoundState.RUNNING) -> str:
    run = a_run(a_host("a", 0), state=state)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(Screen(replace(run, left=left)))
    return console.export_text()


def test_of_many_that_have_left_those_are_named_that_left_last() -> None:
    gone = [replace(a_host(f"spot-{number}"), at_s=NOW_S - 60 * number) for number in range(1, 41)]
    [note] = notes_of(replace(a_run(a_host("a", 0)), left=tuple(gone)))
    assert note.text.startswith("left: spot-1 1.0 min ago, spot-2 2.0 min ago, ")
    assert note.text.endswith("spot-12 12.0 min ago and 28 more; journals have what they did")


def test_the_screen_names_who_has_left_until_the_run_is_over() -> None:
    left = (a_host("b", at_s=NOW_S - 120), HostStatus(host="c", incarnation="c1", at_s=0.0))
    assert "left: b 2.0 min ago, c; journals have what they did" in drawn(*left)
    assert "nobody is there" not in drawn(*left)
    assert "left:" not in drawn()
    assert "left:" not in drawn(*left, state=RoundState.CLOSED)


def test_the_screen_says_that_nobody_is_there_where_all_hosts_are_lost() -> None:
    store = MemoryStore()
    reader = StatusReader(store, URL, clock=lambda: NOW_S)
    key = put_host(store, "h", "1")
    reader.read()
    store.delete(key)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(Screen(reader.read()))
    assert "nobody is there: the run goes on when its launchers are started again" in console.export_text()


# --- hosts that may not take part -------------------------------------------------------------------------------------

BECAUSE = "its health check failed: exit code 1: error burn-in core 3 computes wrong"


def test_a_host_that_is_kept_out_is_an_event_a_line_of_the_screen_and_an_entry_for_programs() -> None:
    store = MemoryStore()
    put_host(store, "a", "aaaaaaaa")
    store.put(KEYS.kept_out_of("b"), KeptOut(NOW_S - 60.0, BECAUSE).encode())
    status = StatusReader(store, URL, clock=lambda: NOW_S).read()
    assert [host.host for host in status.hosts] == ["a"]
    (event,) = [event for event in status.events if event.kind == "kept_out"]
    assert (event.host, event.at_s, event.text) == ("b", NOW_S - 60.0, f"kept out of the run: {BECAUSE}")
    assert run_to_plain(status)["kept_out"] == [{"host": "b", "at_s": NOW_S - 60.0, "because": BECAUSE}]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(Screen(status))
    assert f"kept out of the run: b: {BECAUSE}" in console.export_text()


def test_a_run_that_nobody_could_join_is_known() -> None:
    store = MemoryStore()
    reader = StatusReader(store, URL, clock=lambda: NOW_S)
    assert not is_known(reader.read())
    store.put(KEYS.kept_out_of("b"), KeptOut(NOW_S, BECAUSE).encode())
    assert is_known(reader.read())


def test_what_is_no_such_record_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    reader = StatusReader(store, URL, clock=lambda: NOW_S)
    for value in (b"no JSON", b'{"at_s": 1e300}', b'{"because": 3}', b"[]"):
        store.put(KEYS.kept_out_of("b"), value)
        assert reader.read().kept_out == {}
    assert caplog.text.count(KEYS.kept_out_of("b")) == 1


# --- events -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["save", "loss", "end", "join"]), max_size=60), st.integers(1, 25))
def test_of_each_kind_the_newest_stay_and_the_kinds_share_the_room(kinds: list[str], most: int) -> None:
    lines = list(enumerate(kinds))
    kept = newest(lines, most, lambda line: line[1])
    assert len(kept) == min(most, len(lines))
    assert list(kept) == sorted(kept)
    left_out = Counter(kinds) - Counter(kind for _, kind in kept)
    counts = Counter(kind for _, kind in kept)
    for kind in left_out:
        assert [line for line in lines if line[1] == kind][-counts[kind] or len(lines) :] == [
            line for line in kept if line[1] == kind
        ]
        assert all(counts[other] <= counts[kind] + 1 for other in counts)


def test_losses_stay_among_the_events_of_a_day_of_saves() -> None:
    view = HostView("a", "aaaaaaaa", clock_ns=lambda: 10**15, wall_s=lambda: NOW_S)
    events: list[LedgerEvent] = [
        End(at_ns=10**14, worker="a-1/0.0", exit_code=-9, cause="killed"), StoreOutage(at_ns=10**14),
    ]  # fmt: skip
    events += [Save(at_ns=10**14 + step * 10**9, worker="a-1/0.1", round=1, step=step) for step in range(5000)]
    for event in events:
        view.record(NOW_S + (event.at_ns - 10**15) / 1e9, event)
    for told in (view.lines(), view.status(HostLedger()).events):
        assert [line.kind for line in told[:2]] == ["end", "store_outage"]
        assert told[-1].text.startswith("saved step 4999")
    assert len(view.lines()) == KEPT_EVENTS
    assert len(view.status(HostLedger()).events) == MOST_EVENTS
    half = len(encode_host(view.status(HostLedger()))) // 2
    assert b"etcd is unreachable" in encode_host(view.status(HostLedger()), half), "also where room is short"
