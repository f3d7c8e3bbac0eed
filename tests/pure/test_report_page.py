"""The page about a run: one file that needs nothing else, says everything, and trusts no text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from tests.pure.report_runs import MS, Host, Worker, group_of, journals_of, killed_run, steps
from torchelastic.observe.report.building import report_of
from torchelastic.observe.report.comparing import compared
from torchelastic.observe.report.html_page import html_page
from torchelastic.observe.report.losses import MOST_POINTS, LossFileError, curve_of
from torchelastic.observe.report.model import Report
from torchelastic.observe.report.plain import to_plain
from torchelastic.observe.report.svg import Scale, time_ticks, value_ticks

_VOID = {"meta", "br", "link", "img", "input", "hr"}


class Seen(HTMLParser):
    """What is on a page: well-formed, or an assertion fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script") and data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(journals_of(killed_run()), losses=curve_of((step, 2.0 / (step + 1)) for step in range(24)))


def test_the_page_is_well_formed_and_needs_nothing_from_anywhere(report: Report) -> None:
    text = html_page(report, compared(report, report))
    seen = Seen(text)
    assert text.startswith("<!doctype html>")
    assert not re.search(r"https?://|url\(|@import|//[a-z]", text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name in ("src", "href", "srcset", "xlink:href")]
    assert seen.tags.count("script") == 1
    assert "default-src 'none'" in dict(seen.attributes)["content"] or "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_every_worker_every_figure_and_every_failure_is_named(report: Report) -> None:
    text = Seen(html_page(report)).text
    for life in report.lives:
        assert life.name in text
        assert life.place in text
    for name in ("Goodput", "ETTR", "Step efficiency", "Participation", "Whole job"):
        assert name in text
    for figure in report.figures:
        assert figure.because in text
    assert "beta/1.0: killed by SIGKILL" in text
    assert "beta-1 has ended (fact)" in text
    for phase in ("detect 20 ms", "agree 15 ms", "re_form 10 ms", "sync 10 ms", "step 105 ms"):
        assert phase in text
    assert "What this report lacks" not in text
    assert "ended" in text


def test_a_name_a_cause_or_a_run_that_is_hostile_is_shown_as_text() -> None:
    evil = "<script>alert(1)</script>\"'&\u202e\x00"
    host = Host(f"h{evil}", run_id=f"r{evil}")
    worker, other = Worker(host, "0.0"), Worker(host, f"{evil}.0")
    group_of([worker, other], 10, 1, 0)
    steps([worker, other], 20, 2)
    worker.saves(250, 5, evil)
    other.ends(300, -9)
    worker.fails(310, evil)
    worker.joins(320, 2, 0, 1)
    worker.synchronized(330, 2, evil)
    worker.trains_again(400, 5, 5, 10, evil)
    hostile = report_of({evil: host.journal()}, lacks=[evil])
    page = html_page(hostile, compared(hostile, hostile))
    seen = Seen(page)
    assert seen.tags.count("script") == 1
    assert page.count("alert(1)") >= 8
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)&lt;/script&gt;")
    assert "\u202e" not in page
    assert "\x00" not in page
    json.loads(json.dumps(to_plain(hostile), allow_nan=False))


def test_the_page_of_64_workers_and_thousands_of_events_stays_small_and_says_what_it_leaves_out() -> None:
    hosts = [Host(f"node{number:02}", number * MS, configured=64) for number in range(8)]
    workers = [Worker(host, f"{place}.0") for host in hosts for place in range(8)]
    group_of(workers, 500, 1, 0)
    at_ms = 510
    for round_ in range(1, 31):
        at_ms = steps(workers, at_ms, 2)
        for worker in workers:
            worker.waited(at_ms + 5, 3)
            worker.saves(at_ms + 10, 2)
        at_ms += 10
        for worker in workers:
            worker.fails(at_ms + 10)
        group_of(workers, at_ms + 20, round_ + 1, 2 * round_, "peer")
        for worker in workers:
            worker.trains_again(at_ms + 100, 5, 5, 10, "nobody was lost")
        at_ms += 100
    large = report_of(journals_of(hosts))
    assert large.why_wrong() == ""
    assert len(large.incidents) == 30
    page = html_page(large)
    seen = Seen(page)
    assert len(page) < 1_200_000
    assert all(life.name in seen.text for life in large.lives)
    plain = to_plain(large)
    assert len(plain["failures"]) == len(plain["saves"]) == 30


def test_a_run_of_one_worker_without_anything_else_has_a_page() -> None:
    host = Host("a")
    Worker(host, "0.0")
    small = report_of(journals_of([host]))
    text = Seen(html_page(small)).text
    assert "not ended" in text
    assert "What this report lacks" in text
    assert "No group broke" in text
    assert "No save is in the journals" in text


def test_the_json_has_the_same_content(report: Report) -> None:
    plain = json.loads(json.dumps(to_plain(report, compared(report, report)), allow_nan=False))
    assert plain["run_id"] == "run-1"
    assert plain["sums_are_exact"] is True
    assert list(plain["figures"]) == ["goodput", "ettr", "step_efficiency", "participation", "whole_job_s"]
    goodput = report.figures.goodput
    assert plain["figures"]["goodput"] == {
        "value": goodput.value, "attainable": goodput.attainable, "because": goodput.because,
    }  # fmt: skip
    for life in plain["workers"]:
        assert sum(life["amounts_ns"].values()) == life["wall_ns"]
        drawn_ns = sum(sum(parts.values()) for _from, _to, parts in life["cells"])
        assert drawn_ns == pytest.approx(life["wall_ns"], abs=10 * len(life["cells"]))
    assert plain["failures"][0]["lost"][0]["name"] == "beta/1.0"
    assert plain["failures"][0]["phases_ns"]["detect"] == 20 * MS
    assert plain["failures"][0]["down_ns"] == 160 * MS
    assert plain["seen"]["amounts_ns"]["productive"] == report.seen.amounts[0]
    assert len(plain["losses"]["points"]) == 24
    assert plain["comparison"]["other"]["run_id"] == "run-1"
    assert plain["event_counts"]["failure"] == 3


def test_two_runs_are_compared_and_the_better_one_is_named() -> None:
    host = Host("calm", run_id="calm")
    worker = Worker(host, "0.0")
    group_of([worker], 100, 1, 0)
    steps([worker], 110, 24)
    worker.over(2510)
    worker.ends(2510)
    calm, killed = report_of(journals_of([host])), report_of(journals_of(killed_run()))
    rows = {row.name: row for row in compared(killed, calm).rows}
    assert rows["goodput"].is_better is False
    assert rows["time in productive"].is_better is False
    assert rows["time in start_up"].is_better is False
    assert rows["whole job"].is_better is False
    shorter = dataclasses.replace(calm, lives=(dataclasses.replace(calm.lives[0], step=12),))
    assert {row.name: row for row in compared(killed, shorter).rows}["whole job"].is_better is None, "not the same work"
    assert rows["failures of the group"].this == 1
    assert rows["failures of the group"].other == 0
    assert rows["failure to next committed step, mean"].this == pytest.approx(0.16)
    assert rows["failure to next committed step, mean"].is_better is None
    assert rows["steps, newest"].is_better is None
    back = {row.name: row for row in compared(calm, killed).rows}
    assert back["goodput"].is_better is True
    text = Seen(html_page(killed, compared(killed, calm))).text
    assert "the other one: calm" in text
    assert "worse" in text
    assert "better" in Seen(html_page(calm, compared(calm, killed))).text


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_a_long_curve_is_thinned_and_keeps_its_peaks_and_values_that_are_none_are_counted() -> None:
    pairs = [(step, 100.0 if step == 7777 else 1.0) for step in range(50_000)]
    curve = curve_of([*pairs, (3, float("nan")), (4, float("inf"))])
    assert len(curve.points) <= MOST_POINTS
    assert (curve.steps, curve.left_out) == (50_000, 2)
    assert max(point.high for point in curve.points) == 100.0
    assert curve.points[-1].step == 49_999
    assert isinstance(LossFileError("x"), ValueError)


# --- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until_ns", [0, 1, 999, 10**6, 3 * 10**9, 52 * 10**9, 3_600 * 10**9, 86_400 * 30 * 10**9])
def test_a_time_axis_of_any_length_has_few_round_ticks(until_ns: int) -> None:
    ticks = time_ticks(until_ns)
    assert ticks[0] == (0, "0")
    assert 1 <= len(ticks) <= 11
    assert all(0 <= at_ns <= until_ns for at_ns, _ in ticks)
    assert len({name for _, name in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("low", "high", "is_log"), [(0.0, 1.0, False), (0.001, 3.0, True), (-5.0, 1e9, False), (2.0, 2.1, True)]
)
def test_a_value_axis_has_ticks_within_its_ends(low: float, high: float, is_log: bool) -> None:
    scale = Scale(low, high, 0, 100, is_log)
    ticks = value_ticks(scale)
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert (scale.place(low), scale.place(high)) == (0, 100)
