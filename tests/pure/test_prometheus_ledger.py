"""The ledger as Prometheus has it: counters never fall, and their difference is the book."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from tests.pure.test_ledger_book import DOINGS, STEP_NS, begins, play
from torchelastic.metrics.exposition import MetricsRegistry
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.figures import figures_of
from torchelastic.observe.ledger.host_ledger import MOST_ENDED, HostLedger
from torchelastic.observe.ledger.ledger_events import Drain, StoreOutage, Straggler
from torchelastic.observe.status.host_view import seen_of
from torchelastic.observe.status.ledger_collector import HostSnapshot, LedgerCollector, WorkerPlace

PLACES = (WorkerPlace(0, is_up=True, step=7), WorkerPlace(1, is_up=False, restarts=2))

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Host:
    """A collector over a book that a test changes."""

    def __init__(self) -> None:
        self.snapshot = HostSnapshot(HostLedger(), 0, PLACES)
        self.collector = LedgerCollector(lambda: self.snapshot, run_id="my-run", host="node-1")

    def shows(self, book: HostLedger, now_ns: int) -> None:
        self.snapshot = replace(self.snapshot, book=book, now_ns=now_ns)

    def families(self) -> list[Metric]:
        return list(self.collector.collect())

    def scrape(self) -> Samples:
        return samples(self.families())

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[name, tuple(sorted(labels.items()))]


def samples(families: Iterable[Metric]) -> Samples:
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = float(sample.value)
    return found


def of_accounts(scraped: Samples, name: str) -> list[float]:
    return [scraped[name, (("account", account.label),)] for account in Account]


# --- counters -------------------------------------------------------------------------------------------------------


@given(DOINGS, st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 3_000))
def test_no_counter_ever_falls_and_the_accounts_difference_is_the_book_whenever_it_is_scraped(
    doings: list[tuple[int, str, int, int]], is_scraped: list[bool], ahead_ns: int
) -> None:
    events, _ = play(doings)
    host, book, before = Host(), HostLedger(), Host().scrape()
    for number, event in enumerate(events):
        book = book.after(event)
        if not is_scraped[number % 5]:
            continue
        now_ns = event.at_ns + ahead_ns * (number % 2)  # time that is guessed to go on, and then did not
        host.shows(book, now_ns)
        after = host.scrape()
        for key, value in before.items():
            assert not key[0].endswith("_total") or after[key] >= value, key
        put, taken = (of_accounts(after, f"torchelastic_ledger{side}_seconds_total") for side in ("", "_taken_back"))
        net_ns = [round(1e9 * a) - round(1e9 * b) for a, b in zip(put, taken, strict=True)]
        assert tuple(net_ns) == book.amounts(now_ns)
        before = after


def test_steps_that_a_checkpoint_does_not_hold_are_taken_back_from_productive_and_put_down_to_replayed() -> None:
    host, worker = Host(), begins("h/0.0")
    worker.synchronized(0, 1, 0)
    worker.trains(10)
    host.shows(HostLedger().after_all(worker.told), worker.tally.since_ns)
    assert host.value("torchelastic_ledger_seconds_total", account="productive") == pytest.approx(10 * STEP_NS / 1e9)
    worker.synchronized(worker.tally.since_ns, 2, 4, "checkpoint")
    host.shows(HostLedger().after_all(worker.told), worker.tally.since_ns)
    lost_s = pytest.approx(6 * STEP_NS / 1e9)
    assert host.value("torchelastic_ledger_seconds_total", account="productive") == pytest.approx(10 * STEP_NS / 1e9)
    assert host.value("torchelastic_ledger_taken_back_seconds_total", account="productive") == lost_s
    assert host.value("torchelastic_ledger_seconds_total", account="replayed") == lost_s
    assert host.value("torchelastic_restores_total", source="checkpoint") == 1


def test_counts_that_a_broken_page_takes_back_do_not_make_a_counter_fall() -> None:
    host, worker = Host(), begins("h/0.0")
    worker.synchronized(0, 1, 0)
    known = HostLedger().after_all(worker.told)
    worker.trains(5)
    host.shows(known.after_all(worker.told), worker.tally.since_ns)
    assert host.value("torchelastic_steps_committed_total") == 5
    host.shows(known, worker.tally.since_ns)  # the last page could not be read: its counts never got into the book
    assert known.committed() == 0
    assert host.value("torchelastic_steps_committed_total") == 5


def test_every_event_is_counted_where_it_belongs() -> None:
    host, lost, stays = Host(), begins("h/0.0"), begins("h/1.0")
    for worker in (lost, stays):
        worker.synchronized(100, 1, 0)
        worker.trains(3)
    lost.ends(lost.tally.since_ns + 5)
    stays.fails(lost.tally.since_ns + 5)
    stays.synchronized(stays.tally.since_ns + 10, 2, 3)
    told = [
        *lost.told, *stays.told, Drain(at_ns=1), Straggler(at_ns=2), Straggler(at_ns=3), StoreOutage(at_ns=4),
        StoreOutage(at_ns=5, is_over=True, away_ns=2_500_000_000),
    ]  # fmt: skip
    host.shows(HostLedger().after_all(told), stays.tally.since_ns)
    scraped = {
        name.removeprefix("torchelastic_"): value for (name, labels), value in host.scrape().items() if not labels
    }
    expected = {
        "worker_starts_total": 2, "workers_lost_total": 1, "failures_total": 1, "saves_total": 0, "drains_total": 1,
        "stragglers_total": 2, "etcd_outages_total": 1, "etcd_outage_seconds_total": 2.5, "steps_committed_total": 6,
        "steps_undone_total": 2, "etcd_reachable": 1,
    }  # fmt: skip
    assert {name: scraped[name] for name in expected} == expected
    assert host.value("torchelastic_restores_total", source="peer") == 2, "rounds 1 and 2"


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_status_and_there_are_none_before_the_first_worker() -> None:
    host, worker = Host(), begins("h/0.0")
    assert not [name for name, _ in host.scrape() if name.endswith("_ratio")]
    worker.synchronized(1_000, 1, 0)
    worker.trains(4)
    worker.fails(worker.tally.since_ns + 300)
    worker.synchronized(worker.tally.since_ns + 700, 2, 4)
    worker.trains(2)
    now_ns = worker.tally.since_ns + 50
    book = HostLedger().after_all(worker.told)
    host.shows(book, now_ns)
    figures = figures_of(seen_of(book, now_ns, configured_workers=2))  # of the host's two places one is empty
    assert figures.ettr.value == figures.goodput.value / 2
    assert 0 < figures.goodput.value < figures.goodput.attainable < 1
    for figure in (figures.goodput, figures.ettr, figures.step_efficiency, figures.participation):
        assert host.value(f"torchelastic_{figure.name}_ratio") == figure.value
        assert host.value(f"torchelastic_{figure.name}_attainable_ratio") == figure.attainable
    assert host.value("torchelastic_whole_job_seconds") == figures.whole_job_s.value
    assert host.value("torchelastic_whole_job_attainable_seconds") == figures.whole_job_s.attainable


# --- names and labels -----------------------------------------------------------------------------------------------


def test_however_many_workers_come_and_go_there_are_no_more_series_and_no_counter_falls() -> None:
    host, book = Host(), HostLedger()
    begun = begins("h/0.0")
    begun.synchronized(0, 1, 0)
    host.shows(book.after_all(begun.told), 10)
    before = host.scrape()
    names = set(before)
    for number in range(2 * MOST_ENDED):
        worker = begins(f"h/0.{number}", number * 10 * STEP_NS)
        worker.synchronized(worker.tally.since_ns + 10, number + 1, number % 3, "checkpoint")
        worker.trains(3)
        worker.ends(worker.tally.since_ns)
        book = book.after_all(worker.told)
        host.shows(book, worker.tally.since_ns)
        after = host.scrape()
        assert set(after) == names
        assert not [key for key in names if key[0].endswith("_total") and after[key] < before[key]]
        before = after
    assert host.value("torchelastic_ledger_taken_back_seconds_total", account="productive") > 0
    labels = {label for _, pairs in names for label in pairs}
    accounts = {("account", account.label) for account in Account}
    agent = {label for label in labels if label[0] in ("run_id", "host", "version")}
    assert labels - agent == accounts | {("local_rank", "0"), ("local_rank", "1"), ("source", "peer"),
                                         ("source", "checkpoint")}  # fmt: skip
    assert {name for name, _ in agent} == {"run_id", "host", "version"}


def test_a_workers_metric_cannot_take_a_name_of_the_ledger() -> None:
    registry = MetricsRegistry()
    registry.add(Host().collector)
    for name in ("steps.committed", "ledger.seconds", "goodput.ratio"):
        with pytest.raises(ValueError, match="exists with another type"):
            registry.record(0, "torchelastic", name, 5)
    registry.record(0, "torchelastic", "loss", 0.5)
    assert registry.collector_registry.get_sample_value("torchelastic_worker_starts_total") == 0
