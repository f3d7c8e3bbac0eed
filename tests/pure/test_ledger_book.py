"""The book of a host closes, whatever happens, in whatever order it becomes known."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import MOST_ENDED, HostLedger, ledger_from_dict, ledger_to_dict
from torchelastic.observe.ledger.ledger_events import (
    Counted,
    Drain,
    End,
    Failure,
    LedgerEvent,
    LedgerFormatError,
    Restore,
    Save,
    Start,
    StoreOutage,
    from_dict,
    to_dict,
)

STEP_NS = 1_000


@dataclass
class Worker:
    """Plays one life of a worker: what it does by the rules, and what it tells."""

    name: str
    tally: Counters
    told: list[LedgerEvent] = field(default_factory=list)

    def tell(self, event: LedgerEvent) -> None:
        filled = replace(event, worker=self.name, rank=self.tally.rank, round=self.tally.round, step=self.tally.step)
        self.told.append(filled)

    def counts(self) -> None:
        self.tell(Counted(at_ns=self.tally.since_ns, tally=self.tally))

    def synchronized(self, at_ns: int, round_: int, step: int, source: str = "peer") -> None:
        before = self.tally.step
        entered = self.tally.left(self.tally.since_ns, Account.RE_FORM).entered(at_ns, round_, 0, 2)
        self.tally = entered.synchronized(at_ns + 10, step)
        productive_ns = self.tally.totals[Account.PRODUCTIVE]
        self.tell(Restore(at_ns=at_ns + 10, took_ns=10, from_step=before, productive_ns=productive_ns, source=source))
        self.counts()

    def trains(self, steps: int) -> None:
        for _ in range(steps):
            self.tally = self.tally.commits(self.tally.since_ns + STEP_NS)
        self.counts()

    def fails(self, at_ns: int) -> None:
        before = self.tally
        self.tally = before.undoes(at_ns)
        replayed_ns = self.tally.totals[Account.REPLAYED] - before.totals[Account.REPLAYED]
        self.tell(Failure(at_ns=at_ns, began_ns=at_ns - replayed_ns, replayed_ns=replayed_ns))
        self.counts()

    def ends(self, at_ns: int, *, is_loss: bool = True) -> None:
        self.tell(End(at_ns=at_ns, is_loss=is_loss))


def begins(name: str, at_ns: int = 0) -> Worker:
    worker = Worker(name, Counters.begun(at_ns))
    worker.told.append(Start(at_ns=at_ns, worker=name))
    return worker


def amount(book: HostLedger, worker: str, account: Account, now_ns: int) -> int:
    return book.lives[worker].amounts(now_ns)[account]


# --- any sequence of events -----------------------------------------------------------------------------------------

DOINGS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(("level", "trains", "fails", "ends", "saves", "counts", "outage")),
        st.integers(0, 12),
        st.integers(0, 5_000),
    ),
    max_size=40,
)


def play(doings: list[tuple[int, str, int, int]]) -> tuple[list[LedgerEvent], int]:
    """What three places of a host tell, in the order in which it happens; ended workers are followed by new ones."""
    events: list[LedgerEvent] = []
    workers = {place: begins(f"h/{place}.0") for place in range(3)}
    now_ns, lives, round_ = 0, itertools.count(1), 0
    for place, what, number, passed_ns in doings:
        worker = workers[place]
        now_ns = max(now_ns, worker.tally.since_ns) + passed_ns
        if what == "level":
            round_ += 1
            worker.synchronized(now_ns, round_, number)
        elif what == "trains" and worker.tally.account is Account.PRODUCTIVE:
            worker.trains(number)
        elif what == "fails":
            worker.fails(now_ns)
        elif what == "ends":
            worker.ends(now_ns)
            events += worker.told
            workers[place] = begins(f"h/{place}.{next(lives)}", now_ns)
        elif what == "saves":
            worker.tell(Save(at_ns=now_ns, stall_ns=number, productive_ns=worker.tally.totals[Account.PRODUCTIVE]))
        elif what == "outage":
            worker.told.append(StoreOutage(at_ns=now_ns, is_over=bool(number % 2), away_ns=passed_ns))
        else:
            worker.counts()
        events += worker.told
        worker.told.clear()
    return events, now_ns


@given(DOINGS, st.integers(0, 10**6))
def test_after_any_events_the_accounts_of_every_worker_sum_to_its_wall_time_and_none_is_negative(
    doings: list[tuple[int, str, int, int]], later_ns: int
) -> None:
    events, now_ns = play(doings)
    book = HostLedger()
    for event in events:
        book = book.after(event)
        assert book.why_wrong(now_ns + later_ns) == ""
    assert sum(book.amounts(now_ns + later_ns)) == book.worker_ns(now_ns + later_ns)


@given(DOINGS)
def test_events_that_are_repeated_late_or_mixed_up_cannot_open_the_book(
    doings: list[tuple[int, str, int, int]],
) -> None:
    events, now_ns = play(doings)
    for order in (events[::-1], events + events, sorted(events, key=lambda event: event.worker)):
        assert HostLedger().after_all(order).why_wrong(now_ns) == ""


@given(DOINGS)
def test_what_is_learned_later_only_moves_time_between_productive_replayed_and_detect(
    doings: list[tuple[int, str, int, int]],
) -> None:
    events, now_ns = play(doings)
    book = HostLedger().after_all(events)
    moved = (Account.PRODUCTIVE, Account.REPLAYED, Account.DETECT)
    for life in book.lives.values():
        counted, amounts = life.tally.amounts(life.until_ns(now_ns)), life.amounts(now_ns)
        assert sum(amounts[account] for account in moved) == sum(counted[account] for account in moved)
        assert amounts[Account.PRODUCTIVE] <= counted[Account.PRODUCTIVE]
        others = set(Account) - set(moved) - {Account.START_UP}
        assert all(amounts[account] == counted[account] for account in others)


@given(DOINGS)
@settings(max_examples=examples(40))
def test_a_book_survives_json_and_goes_on_as_before(doings: list[tuple[int, str, int, int]]) -> None:
    events, _ = play(doings)
    half = len(events) // 2
    again = ledger_from_dict(ledger_to_dict(HostLedger().after_all(events[:half])))
    assert again.after_all(events[half:]) == HostLedger().after_all(events)


@given(DOINGS)
def test_events_survive_json(doings: list[tuple[int, str, int, int]]) -> None:
    for event in play(doings)[0]:
        assert from_dict(to_dict(event)) == event


def test_an_event_of_a_later_version_is_left_out_and_a_damaged_one_refused() -> None:
    assert from_dict({"kind": "teleport", "at_ns": 5}) is None
    assert from_dict({"kind": "drain", "at_ns": 5, "new_field": 1}) == Drain(at_ns=5)
    for damaged in ({"at_ns": 5}, {"kind": "drain"}, {"kind": "drain", "at_ns": "5"}, {"kind": "drain", "at_ns": True}):
        with pytest.raises(LedgerFormatError):
            from_dict(damaged)


# --- what each event means ------------------------------------------------------------------------------------------


def test_a_worker_that_has_drained_has_lost_nothing() -> None:
    worker = begins("h/0.0")
    worker.synchronized(100, 1, 0)
    worker.trains(3)
    worker.tally = worker.tally.left(worker.tally.since_ns + 7, Account.IDLE)
    worker.counts()
    worker.tell(Drain(at_ns=worker.tally.since_ns))
    worker.ends(worker.tally.since_ns + 50, is_loss=False)
    book = HostLedger().after_all(worker.told)
    assert amount(book, "h/0.0", Account.REPLAYED, 10**9) == 0
    assert amount(book, "h/0.0", Account.IDLE, 10**9) == 50
    assert (book.undone(), book.counts.lost, book.counts.drains) == (0, 0, 1)


def test_what_is_lost_of_time_that_is_not_counted_yet_is_moved_once_it_is() -> None:
    worker = begins("h/0.0")
    worker.synchronized(0, 1, 0)
    worker.tally = worker.tally.commits(10 + STEP_NS).commits(10 + 2 * STEP_NS)
    worker.synchronized(9_000, 2, 1, "checkpoint")
    *known, counts = worker.told
    assert isinstance(counts, Counted)
    book = HostLedger().after_all(known)
    assert book.why_wrong(9_010) == ""
    assert amount(book, "h/0.0", Account.PRODUCTIVE, 0) == 0
    later = book.after(counts)
    assert amount(later, "h/0.0", Account.PRODUCTIVE, 0) == STEP_NS
    assert amount(later, "h/0.0", Account.REPLAYED, 0) == STEP_NS


def test_a_worker_that_left_before_the_lost_steps_loses_only_what_it_had_done_itself() -> None:
    left, stays = begins("h/0.0"), begins("h/1.0")
    left.synchronized(0, 1, 0)
    left.trains(5)
    left.ends(left.tally.since_ns, is_loss=False)
    stays.synchronized(0, 1, 0)
    stays.trains(20)
    stays.synchronized(30_000, 2, 8, "checkpoint")
    book = HostLedger().after_all([*left.told, *stays.told])
    assert amount(book, "h/0.0", Account.PRODUCTIVE, 10**9) == 5 * STEP_NS
    again = begins("h/2.0")
    again.synchronized(40_000, 3, 2, "checkpoint")
    later = book.after_all(again.told)
    assert amount(later, "h/0.0", Account.REPLAYED, 10**9) == 3 * STEP_NS


def test_nothing_is_lost_by_a_restore_to_a_step_that_is_not_known() -> None:
    worker = begins("h/0.0")
    worker.synchronized(0, 1, 0)
    worker.trains(10)
    worker.synchronized(20_000, 2, -1)
    book = HostLedger().after_all(worker.told)
    assert amount(book, "h/0.0", Account.PRODUCTIVE, 20_000) == 10 * STEP_NS


def test_a_save_tells_exactly_what_going_back_to_it_costs() -> None:
    worker = begins("h/0.0")
    worker.synchronized(0, 1, 0)
    ends_ns = [40, 50, 1_000, 1_005]  # steps of very different length, and no counts in between
    for number, end_ns in enumerate(ends_ns):
        worker.tally = worker.tally.commits(10 + end_ns)
        if number == 1:
            productive_ns = worker.tally.totals[Account.PRODUCTIVE]
            worker.tell(Save(at_ns=10 + end_ns, stall_ns=0, productive_ns=productive_ns))
    worker.counts()
    worker.synchronized(5_000, 2, 2, "checkpoint")
    book = HostLedger().after_all(worker.told)
    assert amount(book, "h/0.0", Account.PRODUCTIVE, 5_000) == 50
    assert amount(book, "h/0.0", Account.REPLAYED, 5_000) == 955


@pytest.mark.parametrize("death_is_known_first", [True, False])
def test_the_time_from_a_death_until_it_is_noticed_is_time_to_detect(death_is_known_first: bool) -> None:
    dead, lives = begins("h/0.0"), begins("h/1.0")
    for worker in (dead, lives):
        worker.synchronized(0, 1, 0)
        worker.trains(2)
    dead.ends(2_010 + 300)
    lives.fails(2_010 + 450)
    order = [dead.told, lives.told] if death_is_known_first else [lives.told, dead.told]
    book = HostLedger().after_all(itertools.chain(*order))
    assert amount(book, "h/1.0", Account.DETECT, 2_460) == 150
    assert amount(book, "h/1.0", Account.REPLAYED, 2_460) == 300
    assert amount(book, "h/0.0", Account.DETECT, 2_460) == 0


def test_a_group_that_is_lost_as_a_whole_is_one_failure_and_a_worker_lost_before_its_first_group_is_one() -> None:
    workers = [begins(f"h/{place}.0") for place in range(3)]
    for worker in workers:
        worker.synchronized(0, 1, 0)
        worker.ends(500)
    early = begins("h/0.1", 600)
    early.ends(700)
    again = begins("h/0.2", 800)
    again.synchronized(900, 2, 0)
    again.ends(1_500)
    stopped = begins("h/1.2", 800)
    stopped.synchronized(900, 2, 0)
    stopped.ends(1_600, is_loss=False)
    book = HostLedger()
    counts = []
    for one in (*workers, early, again, stopped):
        book = book.after_all(one.told)
        counts.append((book.counts.lost, book.counts.failures))
    assert counts == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (5, 3)]


def test_a_process_that_dies_before_it_has_told_anything_was_starting_up() -> None:
    book = HostLedger().after(Start(at_ns=100, worker="h/0.0")).after(End(at_ns=900, worker="h/0.0", exit_code=1))
    assert amount(book, "h/0.0", Account.START_UP, 10**6) == 800


def test_the_end_is_never_before_what_the_worker_has_counted_itself() -> None:
    worker = begins("h/0.0")
    worker.synchronized(0, 1, 0)
    worker.trains(3)
    worker.ends(50)
    book = HostLedger().after_all(worker.told)
    assert book.why_wrong(10**6) == ""
    assert book.lives["h/0.0"].ended_ns == 10 + 3 * STEP_NS


def test_many_ended_workers_are_added_up_with_what_they_had_undone() -> None:
    book = HostLedger()
    for number in range(MOST_ENDED + 20):
        worker = begins(f"h/0.{number}", 10_000 * number)
        worker.synchronized(10_000 * number + 100, number, 0)
        worker.trains(2)
        worker.fails(10_000 * number + 4_000)
        worker.ends(10_000 * number + 5_000)
        book = book.after_all(worker.told)
    assert len(book.lives) == MOST_ENDED
    assert book.worker_ns(10**9) == 5_000 * (MOST_ENDED + 20)
    assert (book.committed(), book.undone()) == (2 * (MOST_ENDED + 20), MOST_ENDED + 20)
    assert book.why_wrong(10**9) == ""
