"""A host's status from its ledger's book, and how fast its workers step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.ledger_events import Counted, End, Join, LedgerEvent, Start
from torchelastic.observe.status.host_view import HostView, published_values
from torchelastic.observe.status.run_progress import Pace
from torchelastic.observe.status.run_status import HostStatus
from torchelastic.rendezvous.records import Round, RoundState

S = 10**9
WALL_S = 1_700_000_000.0


class Clock:
    """Monotonic nanoseconds, and the time of the day."""

    ns = 1000 * S

    def __call__(self) -> int:
        return self.ns

    def wall_s(self) -> float:
        return WALL_S + self.ns / S


def trained(started_ns: int, steps: int, step_ns: int = S // 10, round_: int = 1, rank: int = 0) -> Counters:
    """A worker's counts after so many steps."""
    at_ns = started_ns + 2 * S
    tally = (
        Counters.begun(started_ns)
        .switched(at_ns, Account.IDLE)
        .entered(at_ns + S, round_, rank, 2)
        .synchronized(at_ns + S, 0)
    )
    for number in range(1, steps + 1):
        tally = tally.commits(at_ns + S + number * step_ns)
    return tally


def counted(worker: str, tally: Counters) -> Counted:
    return Counted(at_ns=tally.since_ns, worker=worker, tally=tally)


def a_book() -> HostLedger:
    tallies = {"h-1/0.0": trained(0, 20), "h-1/1.2": trained(0, 20, rank=1)}
    events: list[LedgerEvent] = [Start(at_ns=0, worker="h-1/0.0"), Start(at_ns=0, worker="h-1/1.1")]
    events += [End(at_ns=S, worker="h-1/1.1", exit_code=-9), Start(at_ns=0, worker="h-1/1.2")]
    return HostLedger().after_all([*events, *(counted(worker, tally) for worker, tally in tallies.items())])


def status_at(now_ns: int, round_: int = 1) -> HostStatus:
    view = HostView("h", "1", clock_ns=lambda: now_ns, wall_s=lambda: WALL_S)
    view.update_round(Round(round_, RoundState.RUNNING))
    return view.status(a_book())


def test_a_run_that_is_over_has_no_rate() -> None:
    clock = Clock()
    view = HostView("h", "1", clock_ns=clock, wall_s=clock.wall_s)
    for state, steps in ((RoundState.RUNNING, 20), (RoundState.RUNNING, 40), (RoundState.CLOSED, 40)):
        view.update_round(Round(1, state))
        started = Start(at_ns=0, worker="h-1/0.0")
        status = view.status(HostLedger().after_all([started, counted("h-1/0.0", trained(clock.ns, steps))]))
        assert bool(status.workers[0].steps_per_s) == (steps == 40 and state is RoundState.RUNNING)
        clock.ns += 2 * S


def test_workers_that_live_are_told_and_the_sums_are_of_all_that_ever_did() -> None:
    status = status_at(10 * S)
    assert [(w.worker, w.rank, w.step, w.restarts, w.account) for w in status.workers] == [
        ("h-1/0.0", 0, 20, 0, "productive"), ("h-1/1.2", 1, 20, 2, "productive"),
    ]  # fmt: skip
    assert [sum(worker.amounts) for worker in status.workers] == [10 * S, 10 * S]
    assert status.seen.worker_ns == sum(status.seen.amounts) == 21 * S
    assert (status.seen.wall_ns, status.seen.workers, status.seen.lost) == (10 * S, 3, 1)
    assert (status.began_s, status.workers[0].began_s) == (WALL_S - 10, WALL_S - 10)


def test_whoever_is_not_in_the_present_round_has_no_rank() -> None:
    assert {worker.rank for worker in status_at(10 * S, round_=2).workers} == {-1}


def test_a_book_of_nothing_is_a_status_of_nothing() -> None:
    status = HostView("h", "1", clock_ns=lambda: 5).status(HostLedger())
    assert (status.workers, status.seen.worker_ns, status.seen.wall_ns, status.began_s) == ((), 0, 0, 0.0)


def test_the_view_tells_processes_values_the_round_and_the_last_events() -> None:
    clock = Clock()
    view = HostView("h", "1", clock_ns=clock, wall_s=clock.wall_s)
    view.update_round(Round(1, RoundState.RUNNING))
    first_s = clock.wall_s()
    clock.ns += 7 * S
    view.update_round(Round(1, RoundState.RUNNING, because="said again"))
    view.published(0, [("mine", "loss", 0.5), ("torchelastic", "train_step.duration.ms", 9.0)])
    view.published(1, [("mine", "loss", 0.7)])
    view.record(clock.wall_s() - 3, Join(at_ns=0, worker="h-1/0.0", round=1, rank=0, world_size=2))
    status = view.status(a_book(), 2.0, pids={"h-1/0.0": 77}, journal="/logs", address="http://x", is_etcd_away=True)
    assert (status.round, status.round_state, status.round_since_s) == (1, "running", first_s)
    assert [(worker.pid, dict(worker.values)) for worker in status.workers] == [(77, {"loss": 0.5}), (0, {"loss": 0.7})]
    assert (status.journal, status.address, status.is_etcd_away, status.every_s) == ("/logs", "http://x", True, 2.0)
    assert [line.at_s for line in status.events] == [clock.wall_s() - 3]
    view.ended(1)
    view.update_round(Round(1, RoundState.BROKEN))
    status = view.status(a_book())
    assert [dict(worker.values) for worker in status.workers] == [{"loss": 0.5}, {}], "its place is another's by now"
    assert status.round_since_s == clock.wall_s()


def test_counts_are_no_news() -> None:
    view = HostView("h", "1")
    for event in (Start(at_ns=1, worker="h/0"), counted("h/0", trained(1, 2))):
        view.record(1.0, event)
    assert len(view.status(HostLedger()).events) == 1


def test_at_most_eight_values_of_a_place_are_kept_and_those_go_on() -> None:
    view = HostView("h", "1")
    view.published(0, [("mine", f"value {number}", 1.0) for number in range(20)])
    view.published(0, [("mine", "value 3", 2.0), ("mine", "value 19", 2.0)])
    values = view.status(a_book()).workers[0].values
    assert values == {f"value {number}": 2.0 if number == 3 else 1.0 for number in range(8)}


def test_the_loss_has_a_place_behind_any_number_of_values() -> None:
    view = HostView("h", "1")
    view.published(0, [("mine", f"value {number}", 1.0) for number in range(20)])
    view.published(0, [("mine", "loss", 0.5)])
    values = view.status(a_book()).workers[0].values
    assert values["loss"] == 0.5
    assert len(values) == 8


@pytest.mark.parametrize("now", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_any_more_is_not_shown_as_it_was(now: float) -> None:
    view = HostView("h", "1")
    view.published(0, [("mine", "loss", 0.5), ("mine", "rate", 0.1)])
    view.published(0, [("mine", "loss", now)])
    assert view.status(a_book()).workers[0].values == {"rate": 0.1}
    view.published(0, [("mine", "loss", now), ("mine", "loss", 0.25)])
    assert view.status(a_book()).workers[0].values == {"loss": 0.25, "rate": 0.1}
    view.published(0, [("mine", "loss", 0.25), ("mine", "loss", now)])
    assert view.status(a_book()).workers[0].values == {"rate": 0.1}


@pytest.mark.parametrize(
    "item",
    [
        ("torchelastic", "sync.out_of_sync.parts", 0.0), ("mine", "evaluate.duration.ms", 1.0),
        ("mine", "work.success", 1),
        ("mine", "loss", "0.5"), ("mine", "loss", True),
        ("mine", 5, 1.0), ("mine", "a\nb", 1.0),
    ],
)  # fmt: skip
def test_what_is_not_a_persons_number_is_not_told(item: tuple[object, ...]) -> None:
    assert published_values([item]) == {}


# --- pace -------------------------------------------------------------------------------------------------------------


def pace_of(step_s: float, looks_s: float, until_s: float) -> Pace:
    """Of a worker that steps evenly and is looked at evenly."""
    pace = Pace()
    for look in range(int(until_s / looks_s) + 1):
        step = int(look * looks_s / step_s + 1e-9)
        pace = pace.after(int(step * step_s * S) + 1, step)
    return pace


@pytest.mark.parametrize("step_s", [0.004, 0.02, 0.3, 1.0, 3.7, 60.0])
@pytest.mark.parametrize("looks_s", [0.25, 1.0, 10.0])
def test_the_pace_of_even_steps_is_right_however_long_they_take_and_however_often_one_looks(
    step_s: float, looks_s: float
) -> None:
    pace = pace_of(step_s, looks_s, 300.0)
    last_ns = pace.points[-1][0]
    assert pace.steps_per_s(last_ns + int(min(step_s, looks_s) * S)) == pytest.approx(1 / step_s, rel=0.02)
    assert len(pace.points) <= 22


@given(st.lists(st.tuples(st.integers(0, 100 * S), st.integers(-1, 50)), max_size=30), st.integers(0, 200 * S))
def test_whatever_is_seen_the_pace_is_finite_and_not_negative(seen: list[tuple[int, int]], now_ns: int) -> None:
    pace = Pace()
    for at_ns, step in seen:
        pace = pace.after(at_ns, step)
    assert 0.0 <= pace.steps_per_s(now_ns) < float("inf")


def test_a_worker_that_stands_still_slows_down_to_nothing() -> None:
    pace = pace_of(0.1, 1.0, 20.0)
    last_ns = pace.points[-1][0]
    rates = [pace.steps_per_s(last_ns + seconds * S) for seconds in (0, 2, 5, 30, 3600)]
    assert rates[0] == rates[1] == pytest.approx(10.0)
    assert rates[2] < 0.4
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.001


def test_a_step_that_goes_back_begins_anew() -> None:
    pace = pace_of(0.1, 1.0, 20.0).after(21 * S, 5)
    assert pace.steps_per_s(21 * S) == 0.0
    assert pace.after(22 * S, 15).steps_per_s(22 * S) == pytest.approx(10.0)
