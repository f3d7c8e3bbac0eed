"""Workers that are in no group, and workers that hang: who is named, who is ended, and who is not."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace

import pytest

from tests.process.supervised import ask, failures_into, pid_of, supervise
from tests.waiting import until
from torchelastic.agent import supervisor as supervising
from torchelastic.agent import wait_limit
from torchelastic.agent.causes import FailedWorker
from torchelastic.agent.host_events import MemberWaits, RoundChanged
from torchelastic.agent.idle_workers import IdleWorkers
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.wait_limit import WaitLimit
from torchelastic.rendezvous.records import NO_ROUND, Member, Round, RoundState
from torchelastic.rendezvous.url import parse_url
from torchelastic.rendezvous.worker_rules import LATE_START_FLOOR_S

RUNNING = Round(1, RoundState.RUNNING, ("h-0", "h-1"))
CLOSED = Round(1, RoundState.CLOSED, ("h-0", "h-1"))
#: Nothing but SIGKILL ends it, and it writes no stacks.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


class Watched:
    """An `IdleWorkers` whose clock, round and members the test moves."""

    def __init__(self, supervisor: Supervisor, grace_s: float = 10.0) -> None:
        self.round, self.ahead_s = NO_ROUND, 0.0
        self.members: dict[int, Member] = {}
        self._idle = IdleWorkers(
            supervisor,
            lambda: self.members,
            lambda: self.round,
            grace_s,
            clock=lambda: time.monotonic() + self.ahead_s,
        )

    def check(self, ahead_s: float, round_: Round) -> None:
        self.ahead_s, self.round = ahead_s, round_
        self._idle.check()


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# --- waiting for a group ----------------------------------------------------------------------------------------------


def test_who_waits_for_a_group_says_what_it_takes_once_until_there_is_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limit, "SAY_AFTER_S", 0.04)
    since_s: dict[str, float] = {"h-0": 1.0, "h-1": 1.0}

    async def waits(limit: WaitLimit, names: str, because: Round) -> int:
        limit.on_event(RoundChanged(because))
        for name in names.split():
            limit.on_event(MemberWaits(name))
        await asyncio.sleep(0.2)
        return len(warnings(caplog))

    async def scenario() -> None:
        url = parse_url("etcd://host/run?min_workers=3&last_call_timeout=0.01")
        limit = WaitLimit(url, lambda _event: None, since_s.get, lambda: None)
        assert await waits(limit, "gone", NO_ROUND) == 0
        assert await waits(limit, "h-0 h-1", NO_ROUND) == 1
        assert await waits(limit, "h-0", replace(NO_ROUND, orphaned=True)) == 1
        assert await waits(limit, "h-0", RUNNING) == 1, "a spare"
        assert await waits(limit, "h-1", replace(RUNNING, state=RoundState.BROKEN)) == 2

    asyncio.run(scenario())
    assert warnings(caplog) == [
        f"{name} has waited 0.05 s for a group, which takes min_workers=3: it ends after 600 s (--rdzv-timeout); "
        "`torchelastic status` lists who is here"
        for name in ("h-0", "h-1")
    ]


# --- the process that is meant ----------------------------------------------------------------------------------------


def test_the_successor_of_a_hung_worker_that_died_by_itself_is_not_killed_in_its_place() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        dies, hangs = pid_of(supervisor, 0), pid_of(supervisor, 1)
        supervisor.end_hung(dies)
        os.kill(dies, signal.SIGKILL)
        await until(lambda: supervisor.workers[0].restarts == 1 and supervisor.workers[0].process is not None)
        successor = pid_of(supervisor, 0)
        assert supervisor.workers[1].restarts == 0
        supervisor.end_hung(hangs)  # later than the other, so it is killed later
        await until(lambda: supervisor.workers[1].restarts == 1)
        assert (pid_of(supervisor, 0), supervisor.workers[0].restarts) == (successor, 1)

    supervise(2, scenario)


def test_a_hung_worker_that_is_still_there_is_killed_and_started_again() -> None:
    failures: list[FailedWorker] = []

    async def scenario(supervisor: Supervisor) -> None:
        worker = supervisor.workers[0]
        await until(lambda: "ready" in worker.tail)
        os.kill(pid_of(supervisor, 0), signal.SIGSTOP)
        supervisor.end_hung(pid_of(supervisor, 0))
        await until(lambda: worker.restarts == 1)

    supervise(1, scenario, STUBBORN, publish=failures_into(failures), PYTHONFAULTHANDLER="")
    assert [(failed.exit_code, failed.is_hang) for failed in failures] == [(-signal.SIGKILL, True)]


# --- while the run goes on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round_", "others"), [(RUNNING, "the others train without it"), (NO_ROUND, "no group is training yet")]
)
def test_a_worker_that_is_late_with_its_first_request_is_named_once_and_not_ended(
    caplog: pytest.LogCaptureFixture, round_: Round, others: str
) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        asks, late = pid_of(supervisor, 0), pid_of(supervisor, 1)
        ask(supervisor, asks, 0)
        watched = Watched(supervisor)
        watched.check(LATE_START_FLOOR_S - 30.0, round_)
        assert warnings(caplog) == []
        for more_s in (2.0, 1000.0):
            watched.check(LATE_START_FLOOR_S + more_s, round_)
        (line,) = warnings(caplog)
        assert line.startswith(f"worker 1 (pid {late}) has not asked for a group after 62 s; {others}")
        assert pid_of(supervisor, 1) == late
        ask(supervisor, late, 1)
        assert supervisor.starting == []

    supervise(2, scenario)


def test_a_process_that_a_worker_has_started_asks_in_its_place() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        ask(supervisor, os.getpid(), 1)
        assert [worker.local_rank for worker in supervisor.starting] == [0]
        ask(supervisor, os.getpid(), None)  # started by hand
        assert len(supervisor.starting) == 1

    supervise(2, scenario)


def test_where_workers_start_slowly_one_may_take_longer_before_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        supervisor.workers[0].started_s -= 30.0
        ask(supervisor, pid_of(supervisor, 0), 0)
        watched = Watched(supervisor)
        watched.check(145.0, RUNNING)
        assert warnings(caplog) == []
        watched.check(160.0, RUNNING)
        assert len(warnings(caplog)) == 1

    supervise(2, scenario)


def test_a_worker_that_was_to_leave_and_hangs_is_ended_once_the_others_train_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its host was silent when it hung: no round waits for it, so no round names it as evicted."""

    async def scenario(supervisor: Supervisor) -> None:
        hangs, goes_on = supervisor.workers
        for pid in (pid_of(supervisor, 0), pid_of(supervisor, 1)):
            ask(supervisor, pid, None)
        await until(lambda: "ready" in hangs.tail)
        watched = Watched(supervisor)
        left = Member("h-0", "h", ready_for=1, leaving=True, patience_s=15.0)
        watched.members = {pid_of(supervisor, 0): left, pid_of(supervisor, 1): replace(left, member_id="h-1")}
        without_it = Round(2, RoundState.RUNNING, ("h-1", "h-2"))
        for ahead_s, round_ in ((0.0, RUNNING), (100.0, without_it), (114.0, without_it)):
            watched.check(ahead_s, round_)
        assert not hangs.leaves
        watched.check(116.0, without_it)
        await until(lambda: hangs.is_over)
        assert hangs.exit_code == -signal.SIGABRT
        assert goes_on.process is not None
        assert "was to leave, and does nothing 15 s after the others went on" in warnings(caplog)[0]

    supervise(2, scenario, STUBBORN, PYTHONFAULTHANDLER="1")


# --- after the run has finished ---------------------------------------------------------------------------------------


def test_after_the_run_has_finished_a_late_worker_has_its_grace_and_is_ended_with_its_stacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[FailedWorker] = []

    async def scenario(supervisor: Supervisor) -> None:
        asked, late = supervisor.workers
        ask(supervisor, pid_of(supervisor, 0), 0)
        await until(lambda: "ready" in late.tail)
        watched = Watched(supervisor, grace_s=10.0)
        for ahead_s in (0.0, 9.0):
            watched.check(ahead_s, CLOSED)
        (line,) = warnings(caplog)
        assert f"worker 1 (pid {pid_of(supervisor, 1)}) has not asked for a group: waiting 10 s for it" in line
        assert not late.leaves
        for ahead_s in (11.0, 12.0):
            watched.check(ahead_s, CLOSED)
        await until(lambda: late.is_over)
        assert late.exit_code == -signal.SIGABRT
        assert any("Fatal Python error: Aborted" in line for line in late.tail), "its stacks"
        assert len(warnings(caplog)) == 2
        assert asked.process is not None, "it is in the user's code after training"

    supervise(2, scenario, STUBBORN, PYTHONFAULTHANDLER="1", publish=failures_into(failures))
    assert failures == []


def test_who_ignores_sigterm_and_cannot_write_its_stacks_is_killed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "DUMP_S", 0.1)
    monkeypatch.setattr(supervising, "KILL_GRACE_S", 0.3)

    async def scenario(supervisor: Supervisor) -> None:
        (worker,) = supervisor.workers
        await until(lambda: "ready" in worker.tail)
        os.kill(pid_of(supervisor, 0), signal.SIGSTOP)
        watched = Watched(supervisor, grace_s=0.0)
        watched.check(0.0, CLOSED)
        watched.check(0.0, CLOSED)
        await asyncio.wait_for(supervisor.all_over.wait(), 20.0)
        assert worker.exit_code == -signal.SIGKILL
        assert "it cannot write its stacks" in warnings(caplog)[-1]

    supervise(1, scenario, STUBBORN, PYTHONFAULTHANDLER="")
