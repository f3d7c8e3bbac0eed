"""What a worker counts of itself: the pure rules, and that the fast meter of the training thread keeps to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.ledger_amounts import amounts_of
from torchelastic.ledger.accounts import Account, by_label
from torchelastic.ledger.counters import Counters
from torchelastic.ledger.meter import Meter
from torchelastic.ledger.worker_lifetime import MOST_POINTS, ProgressCurve


class Clock:
    """Nanoseconds that move when they are told to."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


#: What can happen to a worker: what the meter is told, and what that means for a tally.
Happening = tuple[Callable[[Meter], object], Callable[[Counters, int], Counters]]


def told(what: str, number: int) -> Happening:
    if what == "gathers":
        return Meter.group_wanted, lambda t, at: t.left(at, Account.RE_FORM if t.round >= 0 else Account.IDLE)
    if what == "enters":
        return lambda m: m.entered(number, 1, 3), lambda t, at: t.entered(at, number, 1, 3)
    if what == "is level":
        return lambda m: m.level(number), lambda t, at: t.level(at, number)
    if what == "commits":
        return Meter.step_committed, Counters.commits
    if what == "undoes":
        return Meter.step_undone, Counters.undoes
    if what == "waits as a spare":
        return (
            Meter.waits_as_spare,
            lambda t, at: replace(t.left(at, Account.IDLE), rank=-1) if t.account is Account.RE_FORM else t,
        )
    if what == "waits":
        return lambda m: m.waited_for_data(number), lambda t, at: t.waited_for_data(at, number)
    assert what == "is over"
    return Meter.over, lambda t, at: t.left(at, Account.IDLE)


WHAT = ("gathers", "enters", "is level", "commits", "undoes", "waits", "waits as a spare", "is over")
LIVES = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 50), st.integers(0, 10**12)), max_size=30)


def lived(life: Sequence[tuple[str, int, int]]) -> tuple[Counters, Counters, int]:
    """The counts of a meter, those by the rules, and the time."""
    clock = Clock(1_000)
    meter, tally = Meter(400, clock), Counters.begun(400)
    for what, number, passed_ns in life:
        clock.now_ns += passed_ns
        tell, rule = told(what, number)
        tell(meter)
        tally = rule(tally, clock.now_ns)
    return meter.tally(), tally, clock.now_ns


@given(LIVES)
def test_the_meter_counts_as_the_rules_say(life: list[tuple[str, int, int]]) -> None:
    counted, expected, _ = lived(life)
    assert counted == expected


@given(LIVES, st.integers(0, 10**12))
def test_whatever_happens_every_nanosecond_is_in_exactly_one_account(
    life: list[tuple[str, int, int]], later_ns: int
) -> None:
    _, tally, now_ns = lived(life)
    assert tally.why_wrong() == ""
    for amounts in (tally.amounts(now_ns + later_ns), tally.ended(now_ns + later_ns).totals):
        assert sum(amounts) == now_ns + later_ns - 400
        assert min(amounts) >= 0


@given(LIVES)
def test_the_end_of_a_process_leaves_nothing_pending_and_never_adds_to_what_is_productive(
    life: list[tuple[str, int, int]],
) -> None:
    _, tally, now_ns = lived(life)
    ended = tally.ended(now_ns + 5)
    assert ended.pending_ns == 0
    assert ended.totals[Account.PRODUCTIVE] == tally.totals[Account.PRODUCTIVE]


def test_only_what_commits_is_productive() -> None:
    tally = Counters.begun(0).entered(10, 1, 0, 2).level(30, 7).commits(130).undoes(180)
    assert by_label(tally.totals) == by_label(amounts_of(start_up=10, restore=20, productive=100, replayed=50))
    assert (tally.step, tally.committed, tally.undone, tally.account) == (8, 1, 1, Account.RE_FORM)


def test_a_save_in_between_is_a_stall_and_the_step_around_it_stays_one_step() -> None:
    tally = Counters.begun(0).level(0, 0).switched(40, Account.SAVE_STALL).switched(45, Account.PRODUCTIVE).commits(105)
    assert tally.totals[Account.SAVE_STALL] == 5
    assert tally.totals[Account.PRODUCTIVE] == 100
    assert tally.committed == 1


def test_a_group_left_in_order_loses_nothing() -> None:
    tally = Counters.begun(0).level(0, 0).commits(100).left(103, Account.RE_FORM)
    assert tally.totals[Account.PRODUCTIVE] == 103
    assert tally.totals[Account.REPLAYED] == tally.undone == 0


def test_who_is_undone_without_having_begun_has_undone_no_step() -> None:
    tally = Counters.begun(0).entered(10, 1, 0, 2).undoes(30)
    assert (tally.undone, tally.totals[Account.RESTORE], tally.account) == (0, 20, Account.RE_FORM)


def test_a_clock_that_goes_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="monotonic"):
        Counters.begun(100).switched(99, Account.IDLE)


def test_a_block_spent_on_something_ends_where_it_began_unless_the_step_was_undone_in_it() -> None:
    clock = Clock(0)
    meter = Meter(0, clock)
    meter.level(0)
    with meter.saving():
        clock.now_ns = 10
    clock.now_ns = 30
    meter.step_committed()
    assert meter.tally().totals[Account.SAVE_STALL] == 10
    assert meter.tally().totals[Account.PRODUCTIVE] == 20
    with meter.spent_on(Account.DATA_WAIT):
        clock.now_ns = 35
        meter.step_undone("a peer was lost")
        clock.now_ns = 40
    assert meter.tally().account is Account.RE_FORM


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1_000)), min_size=1, max_size=1_500), st.data())
def test_marks_are_bounded_and_never_say_more_than_there_was(grown: list[tuple[int, int]], data: st.DataObject) -> None:
    marks, step, ns = ProgressCurve(), 0, 0
    for steps, more_ns in grown:
        step, ns = step + steps, ns + more_ns
        marks = marks.with_point(step, ns)
    assert len(marks.points) <= MOST_POINTS
    assert marks.points == tuple(sorted(marks.points))
    asked = data.draw(st.integers(0, step + 3))
    assert 0 <= marks.productive_ns_at(asked) <= ns
    assert marks.productive_ns_at(step) == ns
    back = marks.back_to(asked)
    if asked < step:
        assert back.last_step == asked
        assert back.productive_ns_at(asked) == marks.productive_ns_at(asked)


def test_of_very_many_marks_the_newest_are_kept_exactly_and_the_older_ones_thinned_evenly() -> None:
    marks = ProgressCurve()
    for step in range(10_000):
        marks = marks.with_point(step, step * step)
    assert len(marks.points) <= MOST_POINTS
    assert all(marks.productive_ns_at(step) == step * step for step in range(9_940, 10_000))
    assert all(abs(marks.productive_ns_at(step) - step * step) < 0.001 * 10_000**2 for step in range(0, 10_000, 37))
