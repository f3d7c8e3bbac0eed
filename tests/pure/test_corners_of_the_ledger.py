"""What the ledger refuses, and what it makes of news that come late, twice or from two that say to be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from torchelastic.observe.ledger.accounts import NOTHING, Account, plus
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import Earlier, HostLedger, ledger_from_dict, ledger_to_dict
from torchelastic.observe.ledger.ledger_events import (
    Counted,
    End,
    Failure,
    LedgerEvent,
    LedgerFormatError,
    ReForm,
    Restore,
    Save,
    Start,
    from_dict,
    to_dict,
)
from torchelastic.observe.ledger.worker_lifetime import ProgressCurve, WorkerLifetime

WORKER = "h-1/0.0"


def counted(tally: Counters) -> Counted:
    return Counted(at_ns=tally.since_ns, worker=WORKER, tally=tally)


def trained(started_ns: int = 0) -> Counters:
    entered = Counters.begun(started_ns).left(started_ns + 10, Account.IDLE).entered(started_ns + 20, 1, 0, 1)
    return entered.synchronized(started_ns + 30, 0).commits(started_ns + 130)


def test_a_book_whose_accounts_do_not_sum_up_says_whose_and_is_not_read() -> None:
    book = HostLedger().after(Start(at_ns=0, worker=WORKER)).after(counted(trained()))
    assert book.why_wrong(200) == ""
    tally = msgspec.structs.replace(trained(), totals=plus(trained().totals, Account.IDLE, 7))
    wrong = replace(book, lives={WORKER: replace(book.lives[WORKER], tally=tally)})
    assert wrong.why_wrong(200) == f"{WORKER}: 207 ns in accounts, 200 ns on the wall"
    earlier = replace(book, earlier=Earlier(1, 5))
    assert earlier.why_wrong(200) == "the workers that ended earlier"
    assert ledger_from_dict(ledger_to_dict(book)) == book
    with pytest.raises(LedgerFormatError, match="does not sum up: the workers that ended earlier"):
        ledger_from_dict(ledger_to_dict(earlier))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"account": 99}, "tally.account`"),
        ({"totals": [1]}, "tally.totals`"),
        ({"since_ns": "now"}, "tally.since_ns`"),
        ({"committed": -1}, "a count is negative or missing"),
        ({"since_ns": 999}, "the accounts sum to 130 ns of 999"),
    ],
)
def test_counts_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    fields = to_dict(counted(trained()))
    assert from_dict(fields) == counted(trained())
    with pytest.raises(LedgerFormatError, match=said):
        from_dict({**fields, "tally": {**fields["tally"], **change}})


@pytest.mark.parametrize("phases", [[1, 2], {"detect": 1.5}, {"detect": True}])
def test_phases_that_are_no_nanoseconds_are_refused(phases: Any) -> None:
    fields = to_dict(ReForm(at_ns=3, worker=WORKER, phases_ns={"detect": 1}))
    assert from_dict(fields) == ReForm(at_ns=3, worker=WORKER, phases_ns={"detect": 1})
    with pytest.raises(LedgerFormatError, match="phases_ns"):
        from_dict({**fields, "phases_ns": phases})


def test_of_two_workers_that_say_to_be_one_the_first_stands() -> None:
    life = WorkerLifetime.begun(WORKER, 0).counted(counted(trained()))
    assert life.counted(counted(trained(started_ns=50))) is life
    # until anything was counted, the worker knows better when it began
    assert WorkerLifetime.begun(WORKER, 0).counted(counted(trained(started_ns=5))).tally.started_ns == 5


def test_a_worker_ends_once() -> None:
    life = WorkerLifetime.begun(WORKER, 0).ends(End(at_ns=40, worker=WORKER, exit_code=-9))
    assert life.ends(End(at_ns=90, worker=WORKER, exit_code=0)) is life
    assert life.saved(Save(at_ns=95, worker=WORKER, step=3, productive_ns=10)) is life
    assert (life.wall_ns(1000), life.exit_code) == (40, -9)


def test_nothing_is_marked_of_a_step_that_was_passed_or_of_time_that_ran_back() -> None:
    marks = ProgressCurve().with_point(10, 100).with_point(20, 300)
    assert marks.with_point(15, 400) is marks
    assert marks.with_point(25, 200) is marks
    assert marks.with_point(20, 350).points == ((10, 100), (20, 350))


def test_a_step_that_is_not_known_is_marked_nowhere() -> None:
    assert ProgressCurve().with_point(-1, 100) == ProgressCurve()
    assert sum(NOTHING) == ProgressCurve().productive_ns_at(3) == 0


@pytest.mark.parametrize(
    "event", [Start(at_ns=1), counted(trained()), End(at_ns=1), Failure(at_ns=1), Restore(at_ns=1, step=0)]
)
def test_an_event_that_does_not_name_its_worker_changes_nobodys_accounts(event: LedgerEvent) -> None:
    ledger = HostLedger().after(replace(event, worker=""))
    assert (ledger.lives, ledger.worker_ns(10), ledger.counts.failures) == ({}, 0, 0)
