"""A ledger's events as lines for people: what they say, which of them become one, and which are new."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.observe.ledger.ledger_events import (
    Drain,
    End,
    Failure,
    Join,
    LedgerEvent,
    ReForm,
    Restore,
    Save,
    Start,
    StoreOutage,
    Straggler,
)
from torchelastic.observe.status.event_lines import EventFollower, LoggedEvent, lines_of, with_event
from torchelastic.observe.status.run_status import EventLine

MS = 10**6


def save(worker: str, step: int, stall_ms: int = 1) -> Save:
    return Save(at_ns=0, worker=worker, rank=int(worker[-1]), round=1, step=step, stall_ns=stall_ms * MS)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Start(at_ns=0, worker="a/0.1"), "started"),
        (End(at_ns=0, worker="a/0", exit_code=-9, cause="killed"), "lost, signal 9: killed"),
        (End(at_ns=0, worker="a/0", exit_code=0, is_loss=False), "ended, exit code 0"),
        (End(at_ns=0, worker="a/0"), "lost"),
        (Join(at_ns=0, rank=1, round=3, world_size=4, is_first=True), "joined round 3 as rank 1, world size 4"),
        (Join(at_ns=0, worker="a/0", rank=1, round=3, world_size=4), "re-formed: round 3 as rank 1, world size 4"),
        (Failure(at_ns=0, step=7, replayed_ns=250 * MS, cause="x"), "the step after 7 was undone, 250 ms of work: x"),
        (Failure(at_ns=0, replayed_ns=250 * MS, cause="x"), "a step was undone, 250 ms of work: x"),
        (
            Failure(at_ns=0, step=7, replayed_ns=250 * MS, is_undone=False),
            "the step after 7 failed and was not undone, as the state has no snapshot, 250 ms of work",
        ),
        (Restore(at_ns=0, step=7, source="peer", took_ns=1500 * MS), "in sync at step 7 from a peer, 1.50 s"),
        (Restore(at_ns=0, step=7, source="peer", from_step=7, took_ns=1500 * MS), "in sync at step 7, 1.50 s"),
        (ReForm(at_ns=0, phases_ns={"a": 3 * MS, "b": 5 * MS}), "trains again after 8 ms (a 3 ms, b 5 ms)"),
        (Save(at_ns=0, step=7, tier="disk", stall_ns=12 * MS), "saved step 7 to disk, training stopped for 12 ms"),
        (Drain(at_ns=0, step=9), "left the run in order after step 9"),
        (Drain(at_ns=0, step=-1), "left the run in order, in no group yet"),
        (Drain(at_ns=0, step=-1, round=3), "left the run in order"),
        (Restore(at_ns=0, source="peer", took_ns=1500 * MS), "in sync, 1.50 s"),
        (Save(at_ns=0, tier="disk", stall_ns=12 * MS), "saved to disk, training stopped for 12 ms"),
        (Straggler(at_ns=0, relative_percent=61.7), "slow: 62 % of the best"),
        (StoreOutage(at_ns=0), "etcd is unreachable, training goes on as long as no worker is lost"),
        (StoreOutage(at_ns=0, is_over=True, away_ns=2500 * MS), "etcd is back after 2.50 s"),
    ],
    ids=lambda value: value.kind if isinstance(value, LedgerEvent) else "",
)  # fmt: skip
def test_every_event_says_what_happened_and_what_it_cost(event: LedgerEvent, text: str) -> None:
    [line] = lines_of("a", [(12.5, event)])
    assert (line.at_s, line.host, line.kind, line.worker, line.text) == (12.5, "a", event.kind, event.worker, text)
    assert (line.rank, line.round, line.step) == (event.rank, event.round, event.step)


def test_what_four_workers_tell_of_one_moment_is_one_line_with_the_longest_of_them() -> None:
    events = [(10.0 + rank / 10, save(f"a/{rank}", 7, stall_ms=100 - rank)) for rank in range(4)]
    [line] = lines_of("a", events)
    assert line.text == "4 workers: saved step 7, training stopped for 100 ms"
    assert (line.at_s, line.worker, line.rank, line.step) == (10.0, "", -1, 7)


@pytest.mark.parametrize(
    "other",
    [
        save("a/1", 8),  # another step
        replace(save("a/1", 7), round=2),
        save("a/0", 7),  # the same worker once more
        Restore(at_ns=0, worker="a/1", round=1, step=7),
    ],
)
def test_what_is_of_another_moment_stays_a_line_of_its_own(other: LedgerEvent) -> None:
    assert len(lines_of("a", [(10.0, save("a/0", 7)), (10.1, other)])) == 2


def test_the_same_step_saved_once_more_much_later_is_another_line() -> None:
    assert len(lines_of("a", [(10.0, save("a/0", 7)), (60.0, save("a/1", 7))])) == 2


def test_ends_are_never_put_together() -> None:
    ends = [(10.0, End(at_ns=0, worker=f"a/{rank}", exit_code=-9)) for rank in range(3)]
    assert [line.worker for line in lines_of("a", ends)] == ["a/0", "a/1", "a/2"]


def test_the_first_cause_is_kept_whoever_tells_it() -> None:
    events = [
        (1.0, Failure(at_ns=0, worker="a/0", step=3, replayed_ns=5)),
        (1.1, Failure(at_ns=0, worker="a/1", step=3, cause="reset")),
    ]
    [line] = lines_of("a", events)  # fmt: skip
    assert line.text.endswith(": reset")


def test_a_text_is_printable_and_short_whatever_a_worker_says() -> None:
    [line] = lines_of("a", [(0.0, End(at_ns=0, exit_code=1, cause="\x1b[2J" + "x" * 1000))])
    assert line.text.isprintable()
    assert len(line.text) == 400


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_of_any_number_of_events_the_newest_lines_are_kept_and_none_is_lost_before(told: list[tuple[int, int]]) -> None:
    lines: tuple[LoggedEvent, ...] = ()
    for worker, step in told:
        lines = with_event(lines, save(f"a/{worker}", step), 1.0, most=20)
    assert len(lines) <= 20
    everything = lines_of("a", [(1.0, save(f"a/{worker}", step)) for worker, step in told])
    tellers = [1 if line.worker else int(line.text.split(" ", 1)[0]) for line in everything]
    assert sum(tellers) == len(told), "each event is in exactly one line"
    assert [one.line("a") for one in lines] == list(everything[len(everything) - len(lines) :])


# --- following --------------------------------------------------------------------------------------------------------


def line(at_s: float, text: str = "t", host: str = "a", kind: str = "save") -> EventLine:
    return EventLine(at_s=at_s, host=host, kind=kind, text=text)


def test_a_line_is_shown_once_when_it_has_stayed_as_it_is() -> None:
    following = EventFollower()
    assert following.news([line(1.0, "1 worker")]) == []
    assert following.news([line(1.0, "2 workers")]) == [], "it still grows"
    assert following.news([line(1.0, "2 workers")]) == [line(1.0, "2 workers")]
    assert following.news([line(1.0, "2 workers")]) == []
    assert following.news([line(1.0, "3 workers")]) == [], "too late"


def test_two_workers_that_are_lost_in_the_same_millisecond_are_both_shown() -> None:
    ends = [(10.0, End(at_ns=0, worker=f"a/{rank}", round=1, exit_code=-9)) for rank in range(2)]
    following, lines = EventFollower(), lines_of("a", ends)
    assert following.news(lines) == []
    assert following.news(lines) == list(lines)
    assert following.news(lines) == []


def test_at_the_end_everything_is_shown() -> None:
    following = EventFollower()
    following.news([line(1.0)])
    assert following.news([line(1.0, "more"), line(2.0)], is_last=True) == [line(1.0, "more"), line(2.0)]


def test_memory_is_bounded_however_long_one_follows() -> None:
    following = EventFollower()
    for number in range(1000):
        following.news([line(float(number + n)) for n in range(20)])
    assert len(following.shown["a"]) <= 80
    assert len(following.waiting) <= 20
