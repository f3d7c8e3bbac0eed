"""No process that tests have started outlives its pytest, or those that it belongs to; also none that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.harness import Job, process_tree
from tests.process.forked_ranks import Stop, run_ranks
from tests.process.local_ranks import crew_of, succeeded
from tests.waiting import is_gone, pause, wait_until

ROOT = Path(__file__).parents[2]
FOREVER = ["sleep", "600"]


def with_a_child() -> list[int]:
    return [os.getpid(), subprocess.Popen(FOREVER).pid]


def stopped_with_a_child(folder: str) -> None:
    pids = with_a_child()
    Path(folder, "pids").write_text(" ".join(map(str, [os.getppid(), *pids])))
    os.kill(os.getpid(), signal.SIGSTOP)


def forked_forever(folder: str) -> None:
    run_ranks(stopped_with_a_child, folder, stop=Stop(0, until=Path(folder, "never")))


def crew_forever(folder: str) -> None:
    with crew_of(2) as crew:
        crew.run(stopped_with_a_child, folder, ranks=1)


def job_forever(folder: str) -> None:
    job = Job(Path(folder), gates=[2])
    agent = job.start("--standalone", nproc=1).pid
    job.wait_for("held", step=2)
    tree = process_tree(agent)
    Path(folder, "pids").write_text(" ".join(map(str, [tree[1], *tree])))
    pause([agent])
    signal.pause()


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(forked_forever, marks=pytest.mark.long),
        pytest.param(crew_forever, marks=pytest.mark.long),
        job_forever,
    ],
)
def test_they_end_when_pytest_is_killed(start: Callable[[str], None], tmp_path: Path) -> None:
    program = f"import sys; from tests.process.test_killed_pytest import {start.__name__} as start; start(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as pytest_itself:
        try:
            pids = [int(pid) for pid in wait_until(lambda: noted(tmp_path / "pids"), 60, "a rank has begun")]
            wait_until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED, 20, "it stands still")
            pids += [child.pid for child in psutil.Process(pytest_itself.pid).children(recursive=True)]
        finally:
            pytest_itself.kill()
    wait_until(lambda: all(map(is_gone, pids)), 20, "they end", lambda: [pid for pid in pids if not is_gone(pid)])


def noted(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_what_ranks_have_started_ends_with_their_crew() -> None:
    with crew_of(1) as doomed:
        [pids] = succeeded(doomed.run(with_a_child, ranks=1))
        assert not any(map(is_gone, pids))
    wait_until(lambda: all(map(is_gone, pids)), 20, "they end")


def test_what_a_rank_has_started_ends_with_it() -> None:
    [ended] = run_ranks(with_a_child)
    wait_until(lambda: all(map(is_gone, ended.value)), 20, "they end")
