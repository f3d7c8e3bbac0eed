"""What the hosts of a run tell about each other's time."""

from __future__ import annotations

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Head, Journal
from torchelastic.observe.ledger.ledger_events import Counted, End, Failure, LedgerEvent, Restore, Start
from torchelastic.observe.ledger.merge import SILENT_NS, merged_ledgers

#: The clocks of the two hosts differ by so much; their times of the day agree.
AHEAD_NS = 7_000_000


def journal(host: str, ahead_ns: int, events: list[LedgerEvent]) -> Journal:
    return Journal(Head("run", host, 5_000 + ahead_ns, 10**18), HostLedger(), tuple(events))


def trained(
    worker: str, ahead_ns: int, steps: int, round_: int = 1, begin: int = 0
) -> tuple[Counters, list[LedgerEvent]]:
    """A worker that trains steps of 100 ns from 1000 on, by its clock."""
    start_ns = 1_000 + ahead_ns
    tally = Counters.begun(start_ns).entered(start_ns, round_, 0, 2).synchronized(start_ns, begin)
    for number in range(steps):
        tally = tally.commits(start_ns + 100 * (number + 1))
    restore = Restore(at_ns=start_ns, worker=worker, round=round_, step=begin)
    return tally, [Start(at_ns=start_ns, worker=worker), restore]


def counted(worker: str, tally: Counters) -> Counted:
    return Counted(at_ns=tally.since_ns, worker=worker, tally=tally)


def test_the_time_until_a_death_on_another_host_is_noticed_is_time_to_detect() -> None:
    lives, told = trained("a/0.0", 0, 5)
    failed = lives.undoes(1_900)
    told += [
        counted("a/0.0", failed),
        Failure(at_ns=1_900, worker="a/0.0", round=1, step=5, began_ns=1_500, replayed_ns=400),
    ]
    dies, other = trained("b/0.0", AHEAD_NS, 5)
    other += [counted("b/0.0", dies), End(at_ns=1_600 + AHEAD_NS, worker="b/0.0", exit_code=-9)]
    books = merged_ledgers({"a": journal("a", 0, told), "b": journal("b", AHEAD_NS, other)})
    amounts = books["a"].lives["a/0.0"].amounts(1_900)
    assert (amounts[Account.DETECT], amounts[Account.REPLAYED]) == (300, 100)
    assert books["a"].why_wrong(1_900) == books["b"].why_wrong(0) == ""


def test_what_a_host_had_done_that_is_gone_is_lost_beyond_the_step_that_the_others_went_back_to() -> None:
    gone, told = trained("a/0.0", 0, 8)
    told.append(counted("a/0.0", gone))
    _, later = trained("b/0.0", AHEAD_NS + 5_000, 0, round_=1, begin=3)  # a run that begins anew counts its rounds anew
    just_now = merged_ledgers({"a": journal("a", 0, told), "b": journal("b", AHEAD_NS, later)})
    assert just_now["a"].lives["a/0.0"].ended_ns is None, "its agent may be about to write that it was there"
    later.append(End(at_ns=AHEAD_NS + 2 * SILENT_NS, worker="b/0.0", exit_code=0, is_loss=False))
    books = merged_ledgers({"a": journal("a", 0, told), "b": journal("b", AHEAD_NS, later)})
    life = books["a"].lives["a/0.0"]
    assert life.ended_ns == gone.since_ns
    assert life.cause == "its agent was lost"
    amounts = life.amounts(0)
    assert (amounts[Account.PRODUCTIVE], amounts[Account.REPLAYED]) == (300, 500)
    assert books["a"].why_wrong(0) == ""


def test_a_host_that_goes_on_loses_nothing_by_what_another_one_restores() -> None:
    lives, told = trained("a/0.0", 0, 60)
    told.append(counted("a/0.0", lives))
    _, joins = trained("b/0.0", AHEAD_NS + 3_000, 0, round_=2, begin=20)
    books = merged_ledgers({"a": journal("a", 0, told), "b": journal("b", AHEAD_NS, joins)})
    assert books["a"].lives["a/0.0"].ended_ns is None
    assert books["a"].lives["a/0.0"].amounts(0)[Account.PRODUCTIVE] == 6_000


def test_one_journal_alone_is_its_own_book() -> None:
    lives, told = trained("a/0.0", 0, 3)
    told.append(counted("a/0.0", lives))
    alone = journal("a", 0, told)
    assert merged_ledgers({"a": alone}) == {"a": alone.book()}
