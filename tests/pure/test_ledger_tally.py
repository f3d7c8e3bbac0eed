"""What a worker counts of itself: the pure rules, as the meter of the training thread applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.meter import Meter
from torchelastic.observe.ledger.worker_lifetime import MOST_POINTS, ProgressCurve


class Clock:
    """Nanoseconds that move when they are told to."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


#: What can happen to a worker.
HAPPENINGS: dict[str, Callable[[Meter, int], object]] = {
    "gathers": lambda meter, _: meter.group_wanted(),
    "enters": lambda meter, number: meter.entered(number, 1, 3),
    "is in sync": lambda meter, number: meter.synchronized(number),
    "commits": lambda meter, _: meter.step_committed(),
    "undoes": lambda meter, _: meter.step_undone(),
    "waits": lambda meter, number: meter.waited_for_data(number),
    "waits as a spare": lambda meter, _: meter.waits_as_spare(),
    "is over": lambda meter, _: meter.over(),
}
LIVES = st.lists(st.tuples(st.sampled_from(list(HAPPENINGS)), st.integers(0, 50), st.integers(0, 10**12)), max_size=30)


def lived(life: Sequence[tuple[str, int, int]]) -> tuple[Counters, int]:
    """The counts of a meter, and the time."""
    clock = Clock(1_000)
    meter = Meter(400, clock)
    for what, number, passed_ns in life:
        clock.now_ns += passed_ns
        HAPPENINGS[what](meter, number)
    return meter.tally(), clock.now_ns


@given(LIVES, st.integers(0, 10**12))
def test_whatever_happens_every_nanosecond_is_in_exactly_one_account(
    life: list[tuple[str, int, int]], later_ns: int
) -> None:
    tally, now_ns = lived(life)
    assert tally.why_wrong() == ""
    for amounts in (tally.amounts(now_ns + later_ns), tally.ended(now_ns + later_ns).totals):
        assert sum(amounts) == now_ns + later_ns - 400
        assert min(amounts) >= 0


@given(LIVES)
def test_the_end_of_a_process_leaves_nothing_pending_and_never_adds_to_what_is_productive(
    life: list[tuple[str, int, int]],
) -> None:
    tally, now_ns = lived(life)
    ended = tally.ended(now_ns + 5)
    assert ended.pending_ns == 0
    assert ended.totals[Account.PRODUCTIVE] == tally.totals[Account.PRODUCTIVE]


def test_who_waits_as_a_spare_has_no_rank_and_is_idle_and_nobody_else_is() -> None:
    clock = Clock(0)
    meter = Meter(0, clock)
    meter.waits_as_spare()
    assert meter.tally().account is Account.START_UP
    meter.entered(1, 2, 3)
    meter.group_wanted()
    meter.waits_as_spare()
    assert (meter.tally().account, meter.tally().rank, meter.is_spare) == (Account.IDLE, -1, True)


def test_a_clock_that_goes_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="monotonic"):
        Counters.begun(100).switched(99, Account.IDLE)


def test_a_block_spent_on_something_ends_where_it_began_unless_the_step_was_undone_in_it() -> None:
    clock = Clock(0)
    meter = Meter(0, clock)
    meter.synchronized(0)
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


def test_of_very_many_marks_the_newest_are_kept_exactly_and_the_older_ones_thinned_evenly() -> None:
    marks = ProgressCurve()
    for step in range(10_000):
        marks = marks.with_point(step, step * step)
    assert len(marks.points) <= MOST_POINTS
    assert all(marks.productive_ns_at(step) == step * step for step in range(9_940, 10_000))
    assert all(abs(marks.productive_ns_at(step) - step * step) < 0.001 * 10_000**2 for step in range(0, 10_000, 37))
