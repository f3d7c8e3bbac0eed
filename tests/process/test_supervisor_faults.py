"""Errors that nobody foresaw while a worker is supervised: it is neither held up nor waited for for ever."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import pytest

from tests.process.supervised import PATIENCE_S, supervise
from torchelastic.agent.host_events import Event, WorkerExited
from torchelastic.agent.supervisor import KILL_GRACE_S, STARTED_AT_ONCE, Supervisor
from torchelastic.agent.terminal import Terminal

#: More than the pipe to the agent holds: who is not read does not get to its end.
TALKS = "import sys; [print('x' * 100) for _ in range(5000)]; print('the end', file=sys.stderr)"


def run_to_the_end(script: str, **options: Any) -> Supervisor:
    """Run one worker until all is over."""

    async def run() -> Supervisor:
        arguments: dict[str, Any] = {"log_dir": None, **options}
        supervisor = Supervisor(
            [sys.executable, "-c", script], 1, environment={}, max_restarts=0, run_is_over=lambda: False, **arguments
        )
        supervisor.start()
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        return supervisor

    return asyncio.run(run())


def fails(*_arguments: object) -> None:
    raise OverflowError("an error that nobody foresaw")


def test_a_worker_whose_lines_cannot_be_shown_runs_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = run_to_the_end(TALKS, terminal=Terminal(fails))
    assert supervisor.workers[0].exit_code == 0
    assert caplog.text.count("worker 0: lines of its stdout are missing") == 1
    assert "OverflowError" in caplog.text


def test_a_worker_whose_end_cannot_be_handled_does_not_look_as_if_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    def publish(event: Event) -> None:
        if isinstance(event, WorkerExited):
            assert event.worker.process is None
            fails()

    supervisor = run_to_the_end("raise SystemExit(3)", publish=publish)
    assert supervisor.workers[0].gave_up
    assert "this is a bug in torchelastic: worker 0 ended" in caplog.text
    assert "OverflowError" in caplog.text


def test_a_stop_while_many_workers_are_started_starts_no_more_and_ends_those() -> None:
    async def stopped_at_once(supervisor: Supervisor) -> None:
        await asyncio.wait_for(supervisor.stop(KILL_GRACE_S), PATIENCE_S)
        assert supervisor.all_over.is_set()
        codes = [worker.exit_code for worker in supervisor.workers]
        assert codes == [-signal.SIGTERM] * STARTED_AT_ONCE + [None] * 84

    supervise(100, stopped_at_once)
