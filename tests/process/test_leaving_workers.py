"""Workers that were asked to leave: however they end, they have not failed and are not started again."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.process.supervised import PATIENCE_S, ask, failures_into, pid_of, supervise
from tests.waiting import until
from torchelastic.agent.causes import FailedWorker
from torchelastic.agent.host_events import WorkerLeaves
from torchelastic.agent.supervisor import Supervisor


def test_a_worker_that_leaves_is_not_started_again_though_it_is_killed_and_the_other_one_is() -> None:
    failures: list[FailedWorker] = []

    async def scenario(supervisor: Supervisor) -> None:
        leaves, stays = pid_of(supervisor, 0), pid_of(supervisor, 1)
        supervisor.on_event(WorkerLeaves(leaves))
        os.kill(leaves, signal.SIGKILL)
        os.kill(stays, signal.SIGKILL)
        await until(lambda: supervisor.workers[1].restarts == 1 and supervisor.workers[1].process is not None)
        assert (supervisor.workers[0].restarts, supervisor.workers[0].process) == (0, None)
        assert supervisor.workers[0].is_over
        assert [failed.worker for failed in failures] == [1]

    supervise(2, scenario, publish=failures_into(failures))


def test_when_all_have_left_all_is_over() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        for local_rank in range(2):
            supervisor.on_event(WorkerLeaves(pid_of(supervisor, local_rank)))
            os.kill(pid_of(supervisor, local_rank), signal.SIGKILL)
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)

    supervise(2, scenario)


def test_those_that_have_not_asked_for_a_group_are_ended_and_none_is_started_any_more() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        joined, starting = pid_of(supervisor, 0), pid_of(supervisor, 1)
        ask(supervisor, joined, 0)
        supervisor.stop_starting()
        await until(lambda: supervisor.workers[1].exit_code == -signal.SIGTERM)
        assert supervisor.workers[0].process is not None, "it leaves by itself"
        os.kill(joined, signal.SIGKILL)
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        assert supervisor.total_restarts == 0
        assert starting != joined

    supervise(2, scenario)
