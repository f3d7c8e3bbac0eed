"""Runs a real `Supervisor` with small real processes, for the tests of what it does to them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence

from torchelastic.agent.causes import FailedWorker
from torchelastic.agent.host_events import Event, Publish, Statement, WorkerFailed, WorkerSaid, ignore
from torchelastic.agent.plain_group import PlainGroup
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Own

PATIENCE_S = 60.0
WAITS = "import time; time.sleep(60)"


def supervise(
    nproc: int,
    scenario: Callable[[Supervisor], Awaitable[None]],
    script: str = WAITS,
    plain: PlainGroup | None = None,
    publish: Publish = ignore,
    own: Sequence[Own] = (),
    **environment: str,
) -> None:
    """Run the scenario beside so many workers with this script, which are ended with it."""

    async def run() -> None:
        supervisor = Supervisor(
            [sys.executable, "-c", script],
            nproc,
            environment={**os.environ, **environment},
            max_restarts=3,
            log_dir=None,
            run_is_over=lambda: False,
            plain=plain,
            publish=publish,
            own=own,
        )
        supervisor.start()
        try:
            await scenario(supervisor)
        finally:
            await supervisor.stop(1.0)

    asyncio.run(run())


def failures_into(failures: list[FailedWorker]) -> Publish:
    """What to publish to: keeps what has failed."""

    def keep(event: Event) -> None:
        if isinstance(event, WorkerFailed):
            failures.append(event.failed)

    return keep


def ask(supervisor: Supervisor, pid: int, local_rank: int | None) -> None:
    """A process asks for a group."""
    supervisor.on_event(WorkerSaid(Statement.ASKS, pid, local_rank))


def pid_of(supervisor: Supervisor, local_rank: int) -> int:
    """The present process of a worker."""
    process = supervisor.workers[local_rank].process
    assert process is not None
    return process.pid
