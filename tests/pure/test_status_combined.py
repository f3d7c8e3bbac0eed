"""A run's status from those of its hosts."""

from __future__ import annotations

from typing import Any

import pytest

from torchelastic.observe.ledger.accounts import NOTHING, Account, plus
from torchelastic.observe.ledger.figures import Seen
from torchelastic.observe.status.run_status import EventLine, HostStatus, RunStatus, WorkerStatus, combined, is_stale
from torchelastic.rendezvous.records import Round, RoundState

S = 10**9
NOW_S = 1_700_000_000.0
ROUND = Round(3, RoundState.RUNNING, ("a-0", "b-0"))


def a_host(name: str, **changes: Any) -> HostStatus:
    return HostStatus(**{"host": name, "incarnation": f"{name}1", "at_s": NOW_S - 1.0, **changes})


def run_of(*hosts: HostStatus, **changes: Any) -> RunStatus:
    known: dict[str, Any] = {"run_id": "job7", "at_s": NOW_S, "round_": ROUND, "members": [], "hosts": hosts}
    return combined(**{**known, **changes})


def test_since_when_the_round_is_in_its_state_is_what_the_first_agent_heard_of_that_state() -> None:
    def heard(number: int, state: str, since_s: float) -> dict[str, Any]:
        return {"round": number, "round_state": state, "round_since_s": since_s}

    hosts = [
        a_host("a", **heard(3, "running", NOW_S - 50)), a_host("b", **heard(3, "running", NOW_S - 60)),
        a_host("c", **heard(2, "running", NOW_S - 90)), a_host("d", **heard(3, "gathering", NOW_S - 80)),
        a_host("e", **heard(3, "running", 0.0)),
    ]  # fmt: skip
    assert run_of(*hosts).round_since_s == NOW_S - 60
    assert run_of(*hosts[2:]).round_since_s == 0.0


def test_amounts_are_added_and_failures_of_the_group_counted_once() -> None:
    amounts = plus(NOTHING, Account.PRODUCTIVE, 10 * S)
    seen = Seen(20 * S, 10 * S, amounts, 0, 2, 100, 3, 2, 1, 1, 5)
    status = run_of(
        a_host("a", seen=seen, began_s=NOW_S - 100), a_host("b", seen=seen, began_s=NOW_S - 40),
        a_host("c", seen=seen, at_s=NOW_S - 60),
    )  # fmt: skip
    assert status.seen.amounts == plus(NOTHING, Account.PRODUCTIVE, 30 * S)
    assert status.seen.worker_ns == sum(status.seen.amounts), "what a silent host has told counts"
    assert (status.seen.wall_ns, status.seen.workers, status.seen.committed, status.seen.undone) == (100 * S, 6, 300, 9)
    assert (status.seen.failures, status.seen.restores_from_checkpoint, status.seen.lost) == (2, 1, 3)
    assert status.figures.goodput.value == 1.0


@pytest.mark.parametrize(
    ("period_s", "age_s", "stale"), [(1.0, 5.0, False), (1.0, 5.1, True), (10.0, 30.0, False), (10.0, 30.1, True)]
)
def test_a_host_is_silent_after_three_periods_and_at_least_five_seconds(
    period_s: float, age_s: float, stale: bool
) -> None:
    host = a_host("a", at_s=NOW_S - age_s, every_s=period_s)
    assert is_stale(host, NOW_S) is stale
    status = run_of(host)
    assert (len(status.hosts), len(status.silent)) == (not stale, stale)


def test_workers_come_by_rank_and_events_by_time() -> None:
    def worker(host: str, rank: int, step: int = 5, rate: float = 2.0) -> WorkerStatus:
        return WorkerStatus(worker=f"{host}/{rank}", host=host, rank=rank, step=step, steps_per_s=rate)

    def event(host: str, at_s: float) -> EventLine:
        return EventLine(at_s=at_s, host=host, kind="save", text="t")

    first = a_host("a", workers=(worker("a", 2, step=7), worker("a", -1)), events=(event("a", 1.0), event("a", 3.0)))
    status = run_of(first, a_host("b", workers=(worker("b", 0, rate=3.0), worker("b", 1)), events=(event("b", 2.0),)))
    assert [one.rank for one in status.workers] == [0, 1, 2, -1]
    assert [line.at_s for line in status.events] == [1.0, 2.0, 3.0]
    assert (status.step, status.steps_per_s) == (7, 3.0)
