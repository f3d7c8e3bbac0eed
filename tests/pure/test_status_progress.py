"""How far a run is: in one line, from the same figures for `top`, the launcher's own line and its log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from tests.pure.status_runs import a_host, a_worker
from torchelastic.agent.shown_progress import ShownProgress
from torchelastic.agent.terminal import Terminal
from torchelastic.data import ElasticBatchSampler
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.ledger_events import Restore, Start
from torchelastic.observe.status.host_view import HostView
from torchelastic.observe.status.run_progress import Progress
from torchelastic.observe.status.run_status import HostStatus, by_rank, progress_of
from torchelastic.rendezvous.records import Round, RoundState


@pytest.mark.parametrize(
    ("known", "parts"),
    [
        ({}, []),
        ({"step": 0, "end_step": 10}, ["step 0"]),
        ({"step": 7, "steps_per_s": 2.0}, ["step 7", "2 steps/s"]),
        ({"step": 7, "end_step": 5}, ["step 7"]),
        (
            {"step": 5, "end_step": 20, "steps_per_s": 0.002, "loss": float("nan")},
            ["step 5 of 20 (25 %)", "0.002 steps/s", "loss nan", "about 2.1 h left"],
        ),
        ({"step": 20, "end_step": 20, "steps_per_s": 2.0}, ["step 20 of 20 (100 %)", "2 steps/s"]),
    ],
)
def test_what_is_known_is_said(known: dict[str, float], parts: list[str]) -> None:
    assert Progress(**known).parts() == parts  # type: ignore[arg-type]


def test_a_group_is_as_far_as_its_fastest_member_and_the_loss_is_that_of_the_first_rank_that_tells_one() -> None:
    workers = (
        a_worker(1, "b", step=12, end_step=20, steps_per_s=3.0),
        a_worker(-1, "b", step=-1, steps_per_s=0.0, values={"loss": 9.0}),
        a_worker(0, "a", step=11, end_step=20, steps_per_s=2.0, values={}),
    )
    told = progress_of(by_rank(workers))
    assert told == Progress(step=12, end_step=20, steps_per_s=3.0, loss=1.125)


def test_a_host_knows_the_end_from_what_its_workers_say_when_they_begin() -> None:
    view = HostView("h", "1")
    book = HostLedger().after_all([Start(at_ns=0, worker="h-1/0.0")])
    view.update_round(Round(1, RoundState.RUNNING))
    view.record(0.0, Restore(at_ns=0, worker="h-1/0.0", step=0, end_step=16))
    (worker,) = view.status(book).workers
    assert worker.end_step == 16
    assert view.furthest(book) == Progress(step=-1, end_step=16)


def test_a_sampler_knows_the_batches_that_are_left_wherever_it_stands() -> None:
    sampler = ElasticBatchSampler(10, 4, epochs=3)
    for left in range(9, 0, -1):
        assert sampler.batches_left == left
        sampler.consume()
        assert sampler.batches_left == left, "only what is committed counts"
        sampler.commit()
    assert sampler.batches_left == 0


# --- the launcher's own line ------------------------------------------------------------------------------------------


class Host:
    """A host whose workers advance, and what its screen shows."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.now_s = 1000.0
        self.step = -1
        self.waits = ""
        self.below: list[str] = []
        terminal = Terminal(lambda _stream, _text: None, below=self.below.append if is_terminal else None)
        self.shown = ShownProgress(self.status, terminal, lambda: self.waits, clock=lambda: self.now_s)

    def status(self) -> HostStatus:
        return a_host("a", workers=(a_worker(0, "a", step=self.step, end_step=100, steps_per_s=2.0, values={}),))


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    events_log, handler = logging.getLogger("torchelastic.events"), Handler()
    before = events_log.level
    events_log.addHandler(handler)
    events_log.setLevel(logging.INFO)
    yield records
    events_log.removeHandler(handler)
    events_log.setLevel(before)


def test_a_terminal_has_it_at_the_bottom_and_keeps_the_last_one(logged: list[logging.LogRecord]) -> None:
    host = Host(is_terminal=True)
    host.shown.look()
    assert host.below == [], "nothing is known yet"
    host.step = 50
    host.shown.look()
    assert host.below == ["step 50 of 100 (50 %)  2 steps/s  about 25 s left"]
    assert logged == []
    host.waits = "the run waits for etcd at a:2379 since 12:00:00"
    host.shown.look()
    assert host.below[-1] == "step 50 of 100 (50 %)  the run waits for etcd at a:2379 since 12:00:00", "it has no speed"
    host.shown.end(Progress(step=100, end_step=100))
    assert host.below[-1] == ""
    assert [record.getMessage() for record in logged] == ["step 100 of 100 (100 %)"]


def test_a_file_has_a_line_after_a_minute_and_then_more_and_more_seldom(logged: list[logging.LogRecord]) -> None:
    host = Host(is_terminal=False)
    host.step, at_s = 50, []
    for second in range(8 * 3600):
        host.now_s = 1000.0 + second
        before = len(logged)
        host.shown.look()
        at_s += [second] * (len(logged) - before)
    assert at_s[:6] == [60, 120, 240, 480, 960, 1920]
    assert {after - before for before, after in itertools.pairwise(at_s[6:])} == {1800}
    assert logged[0].getMessage() == "step 50 of 100 (50 %), 2 steps/s, about 25 s left"
    assert logged[0].torchelastic_fields["step"] == 50  # type: ignore[attr-defined]
    before = len(logged)
    host.shown.end(Progress(step=100))
    assert len(logged) == before, "each event of the end has its line there"
