"""What a worker has started and left running: it goes on where the worker has ended with 0, and ends with a failure."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.supervised import PATIENCE_S, supervise
from tests.waiting import is_gone, until, wait_until
from torchelastic.agent.left_output import Pipe, relay
from torchelastic.agent.supervisor import Supervisor

#: Leaves one in its own session, one in another, and ends.
LEAVES = """
import os, subprocess, sys
here = subprocess.Popen(["sleep", "61"])
other = subprocess.Popen(["sleep", "62"], start_new_session=True)
print(here.pid, other.pid, file=sys.stderr, flush=True)
os._exit(0)
"""


@pytest.fixture
def killed_afterwards() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_after_exit_code_0_it_goes_on_and_is_named(
    killed_afterwards: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    pids: list[int] = []

    async def scenario(supervisor: Supervisor) -> None:
        worker = supervisor.workers[0]
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        pids.extend(map(int, worker.tail[0].split()))
        killed_afterwards.extend(pids)

    supervise(1, scenario, LEAVES)
    assert [is_gone(pid) for pid in pids] == [False, False]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"worker 0 has left running what it has started: sleep 61 (pid {pids[0]})" in line


def test_after_a_signal_it_ends(killed_afterwards: list[int]) -> None:
    signalled = LEAVES.replace("os._exit(0)", "os.kill(os.getpid(), 9)")
    pids: list[int] = []

    async def scenario(supervisor: Supervisor) -> None:
        worker = supervisor.workers[0]
        await until(lambda: len(worker.tail) == 1)
        pids.extend(map(int, worker.tail[0].split()))
        killed_afterwards.extend(pids)
        await until(lambda: worker.restarts == 1)
        await until(lambda: is_gone(pids[0]))
        assert not is_gone(pids[1]), "it is in a session of its own"

    supervise(1, scenario, signalled)


def test_what_it_writes_after_the_launchers_end_is_read_to_its_end(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    script = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; yes line | head -100000; touch {tmp_path}/done"
    writes = subprocess.Popen(["sh", "-c", script], stdout=writer)
    os.close(writer)
    pid = relay([Pipe(reader, "")])
    assert pid is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    (tmp_path / "go").touch()
    assert writes.wait(PATIENCE_S) == 0
    assert (tmp_path / "done").exists()
    wait_until(lambda: is_gone(pid), what="the one that reads ends too")


def test_without_anything_to_read_nothing_is_started() -> None:
    assert relay([]) is None
