"""What the live page is sent: documents, their differences, how often."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.pure.merge_patch import applied
from tests.pure.report_runs import journals_of, killed_run
from tests.pure.status_runs import NOW_S, a_host, a_run
from torchelastic.observe.ledger.accounts import STYLES, Account
from torchelastic.observe.ledger.figures import Figure
from torchelastic.observe.ledger.ledger_events import End, Failure, Save
from torchelastic.observe.page.answers import SECURITY_HEADERS, head, static_files
from torchelastic.observe.page.document import BYTES_PER_S, About, difference, document_of, pause_s
from torchelastic.observe.page.feed import Feed, FeedTick, RunSnapshot, as_json
from torchelastic.observe.page.source import with_own_host
from torchelastic.observe.report.building import report_of
from torchelastic.observe.report.html_page import html_page
from torchelastic.observe.status.event_lines import lines_of
from torchelastic.observe.status.run_status import EventLine
from torchelastic.observe.status.status_format import run_to_plain

leaves = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.lists(st.integers())
documents: Any = st.recursive(
    st.dictionaries(st.text(max_size=3), leaves, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=3), inner | leaves, max_size=4),
)

# --- differences ------------------------------------------------------------------------------------------------------


@given(documents, documents)
def test_what_has_changed_makes_the_new_document_of_the_old_one(old: Any, new: Any) -> None:
    patched = applied(old, difference(old, new))
    assert json.dumps(patched, sort_keys=True) == json.dumps(new, sort_keys=True)
    assert difference(new, new) == {}


def test_only_what_has_changed_is_sent() -> None:
    old = {"a": {"x": 1, "y": 2}, "b": [1], "gone": 3}
    assert difference(old, {"a": {"x": 1, "y": 5}, "b": [1]}) == {"a": {"y": 5}, "gone": None}
    assert repr(difference({"n": 1}, {"n": True})) == "{'n': True}", "for JSON they are two things"


# RFC 7396, Appendix A, without those whose patch or target is no object
# --- documents --------------------------------------------------------------------------------------------------------


def nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(nulls, value.values()))
    return value is None


def test_a_document_says_what_the_status_says_and_holds_no_null() -> None:
    status = a_run(a_host("node-1", 0, 1), a_host("node-2", 2))
    plain, document = run_to_plain(status), document_of(status, About("node-1", "1.2", 5.0))
    assert not nulls(document)
    for name in ("members", "workers", "hosts", "silent", "events"):
        assert list(document[name].values()) == plain[name]
    assert document["figures"]["goodput"] == plain["figures"]["goodput"]
    assert document["page"] == {"host": "node-1", "version": "1.2", "etcd_away_s": 5.0}
    json.dumps(document, allow_nan=False)
    unbounded = replace(status.figures, whole_job_s=Figure("whole_job_s", 1.0, math.inf, "nothing was committed"))
    told = document_of(replace(status, figures=unbounded), About("node-1"))
    assert told["figures"]["whole_job_s"] == {"value": 1.0, "because": "nothing was committed"}


def test_two_of_one_name_are_both_shown() -> None:
    event = EventLine(at_s=NOW_S, host="node-1", kind="save", text="one")
    host = a_host("node-1", 0, events=(event, replace(event, text="two")))
    document = document_of(a_run(host, host), About("node-1"))
    assert [one["text"] for one in document["events"].values()] == ["one", "two"] * 2
    assert len(document["workers"]) == len(document["hosts"]) == 2


@given(st.integers(0, 10**9))
def test_however_large_the_messages_are_the_bytes_per_second_are_bounded(sent: int) -> None:
    assert pause_s(sent) >= 1.0
    assert sent / pause_s(sent) <= BYTES_PER_S * 1.001


def test_the_page_knows_what_went_wrong_by_these_words() -> None:
    """timeline.js goes by them: kind and, for the end of a process, how its text begins."""
    told = [
        End(at_ns=0, exit_code=-9), End(at_ns=0, is_loss=False), Failure(at_ns=0),
        Save(at_ns=0),
    ]  # fmt: skip
    lines = [lines_of("h", [(NOW_S, event)])[0] for event in told]
    bad = [one.kind == "failure" or (one.kind == "end" and one.text.startswith("lost")) for one in lines]
    assert bad == [True, False, True, False]


def test_the_own_host_is_shown_as_its_agent_knows_it_and_others_are_no_older_without_etcd() -> None:
    own, other = a_host("node-1", 0), a_host("node-2", 1)
    read = a_run(own, other)
    newer = replace(own, at_s=NOW_S + 60, workers=tuple(replace(one, step=1300) for one in own.workers))
    status = with_own_host(read, newer, NOW_S + 60, away_s=60.0)
    assert (status.step, len(status.hosts), status.silent) == (1300, 2, ())
    assert status.round == read.round
    assert status.members == read.members
    late = with_own_host(read, newer, NOW_S + 60)
    assert [host.host for host in late.silent] == ["node-2"], "with etcd in sight it is the other host that is silent"
    assert with_own_host(read, None, NOW_S).hosts == read.hosts


# --- ticks ------------------------------------------------------------------------------------------------------------


def pictures(*numbers: int) -> list[RunSnapshot]:
    return [RunSnapshot({"plain": n}, {"n": n, "same": "x"}) for n in numbers]


def heard(count: int, told: list[RunSnapshot]) -> list[FeedTick]:
    """The first ticks of a feed that reads these pictures."""

    async def listen() -> list[FeedTick]:
        left = list(told)

        async def read() -> RunSnapshot:
            return left.pop(0) if len(left) > 1 else left[0]

        feed = Feed(read, sleep=lambda _s: asyncio.sleep(0))
        ticks: list[FeedTick] = []
        async with feed.listening():
            while len(ticks) < count:
                ticks.append(await asyncio.wait_for(feed.newer(ticks[-1].number if ticks else 0), 5))
        await feed.stop()
        return ticks

    return asyncio.run(listen())


def test_who_has_missed_nothing_is_sent_the_change_and_everybody_else_everything() -> None:
    first, second = heard(2, pictures(1, 2))
    assert first.message(0) == b'event: whole\ndata: {"n":1,"same":"x"}\n\n'
    assert second.message(1) == b'event: change\ndata: {"n":2}\n\n'
    assert second.message(0) == b'event: whole\ndata: {"n":2,"same":"x"}\n\n'
    third = FeedTick(3, pictures(3)[0], b"{}")
    assert third.message(1).startswith(b"event: whole")


def test_nothing_is_read_while_nobody_looks() -> None:
    async def count() -> list[int]:
        reads = [0]

        async def read() -> RunSnapshot:
            reads[0] += 1
            return pictures(reads[0])[0]

        async def a_second(_s: float) -> None:
            await asyncio.sleep(0)

        feed = Feed(read, sleep=a_second)
        found = []
        for _ in range(2):
            async with feed.listening():
                await asyncio.wait_for(feed.newer(0), 5)
            for _ in range(100):
                await asyncio.sleep(0)
            found.append(reads[0])
            for _ in range(100):
                await asyncio.sleep(0)
            found.append(reads[0])
        return found

    one, same, two, same_again = asyncio.run(count())
    assert 0 < one == same < two == same_again


def test_a_message_is_one_line_whatever_is_in_it() -> None:
    assert as_json({"a": "x\n\r\u2028\ud800"}).count(b"\n") == 0


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_every_answer_carries_the_security_headers_and_ends_the_connection() -> None:
    told = head(200, "text/plain", 3, {"ETag": '"v"'}).decode()
    assert told.startswith("HTTP/1.1 200 OK\r\n")
    assert told.endswith("\r\n\r\n")
    for name, value in {**SECURITY_HEADERS, "Connection": "close", "Content-Length": "3", "ETag": '"v"'}.items():
        assert f"\r\n{name}: {value}\r\n" in told
    assert "default-src 'self'" in SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


def test_the_pages_files_name_nothing_elsewhere_and_put_no_text_in_as_html() -> None:
    files = static_files()
    assert {"index.html", "page.js", "page.css", "icon.svg"} <= set(files)
    for name, file in files.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{name} names an address elsewhere"
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert word not in text, f"{name}: {word}"
    assert b"<script>" not in files["index.html"].content


def test_accounts_have_the_same_names_and_colours_on_the_page_and_in_the_report() -> None:
    files = {name: file.content.decode() for name, file in static_files().items()}
    report = html_page(report_of(journals_of(killed_run())))
    for account, style in STYLES.items():
        assert f'"{account.label}"' in files["accounts.js"]
        for colour in (style.light, style.dark):
            assert f"--{account.label}: {colour};" in files["accounts.css"]
            assert f"--{account.label}: {colour};" in report
    assert len({style.light for style in STYLES.values()}) == len(STYLES) == len(Account)
    for name in set(files) - {"accounts.css", "accounts.js"}:
        for account in Account:
            assert f"--{account.label}:" not in files[name], f"{name} has a colour of its own for {account.label}"
    assert "accounts.css" in files["index.html"]
