"""A benchmark that is interrupted leaves nothing behind: no agent, no worker, no etcd, no busy process, no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.job.processes import Load
from tests.waiting import wait_until
from torchelastic.processes import dies_with_parent

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
WORKERS = "benchmarks.job"


@pytest.fixture
def benchmark(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.recovery", "--kills", "1000", "--workers", "2", "--load", "1"]
    process = subprocess.Popen(
        dies_with_parent([*command, "--salvage", "drop"]),
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()
    for left in running(list(psutil.process_iter()), str(tmp_path)):  # after a failure
        left.kill()


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def running(processes: list[psutil.Process], words: str = "") -> list[psutil.Process]:
    """Those that have not ended and have these words in their command line."""
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE and words in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def interrupt(process: subprocess.Popen[bytes], number: int) -> list[psutil.Process]:
    """Send the signal and wait for the process's end; returns the descendants it had that still run then."""
    tree = descendants(process)
    assert running(tree, "etcd"), "the job had no etcd of its own"
    process.send_signal(number)
    process.wait(LIMIT_S)
    return running(tree)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_the_workers_start_nothing_is_left(
    benchmark: subprocess.Popen[bytes], tmp_path: Path, number: int, exit_code: int
) -> None:
    wait_until(lambda: len(running(descendants(benchmark), WORKERS)) >= 4, what="the agent, two workers and the spares")
    assert interrupt(benchmark, number) == []
    assert benchmark.returncode == exit_code
    assert list(tmp_path.iterdir()) == []


def test_killed_it_takes_agent_workers_and_etcd_with_it(benchmark: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(running(descendants(benchmark), WORKERS)) >= 4, what="the agent, two workers and the spares")
    left = interrupt(benchmark, signal.SIGKILL)
    assert benchmark.returncode == -signal.SIGKILL
    wait_until(lambda: not running(left), what="their end")


def test_the_load_is_busy_and_ends_with_an_error_in_its_block() -> None:
    def fail() -> None:
        with Load(2) as load:
            found.extend(map(psutil.Process, load.pids))
            wait_until(lambda: all(sum(process.cpu_times()[:2]) > 0.1 for process in found), what="that both are busy")
            raise RuntimeError("in the block")

    found: list[psutil.Process] = []
    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert len(found) == 2
    assert not running(found)
