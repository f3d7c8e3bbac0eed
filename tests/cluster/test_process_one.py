"""A launcher that is process 1 of its own, as in a container without an init."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.harness import Job, RunRecords, process_tree
from tests.waiting import is_gone, wait_until

MakeJob = Callable[..., Job]

#: A PID namespace with a /proc of its own, all of which ends with it.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]


def why_impossible() -> str:
    if shutil.which("unshare") is None:
        return "no unshare here (Debian: util-linux)"
    done = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
    return f"no PID namespace, as root on Linux: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.long
def test_sigterm_to_process_one_lets_its_workers_leave_and_nothing_stays(jobs: MakeJob) -> None:
    if impossible := why_impossible():
        pytest.skip(impossible)
    job = jobs(gates=[10])
    command = [
        sys.executable,
        "-m",
        "torchelastic.launch",
        "run",
        "--standalone",
        "--nproc-per-node=2",
        str(job.script),
    ]
    command += job.job_arguments()
    outer = job._popen([*ALONE, *command], "agent-0.txt", {})
    job.agents.append(outer)
    job.wait_for("held", count=2, step=10)
    assert len({event["pid"] for event in job.of("started")}) == 2
    [launcher] = psutil.Process(outer.pid).children()
    status = Path(f"/proc/{launcher.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("NSpid:")]
    assert line.split()[-1] == "1"
    family = process_tree(launcher.pid)
    assert len(family) >= 4, "two workers and an etcd"
    workers = [one for one in psutil.Process(launcher.pid).children() if str(job.script) in one.cmdline()]
    [etcd] = [one for one in psutil.Process(launcher.pid).children() if "--listen-client-urls" in one.cmdline()]
    endpoint = etcd.cmdline()[etcd.cmdline().index("--listen-client-urls") + 1].removeprefix("http://")
    [run_id] = {one.environ()["TORCHELASTIC_RUN_ID"] for one in workers}
    records = RunRecords(endpoint, run_id)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: records.rounds()[-1] == (1, "gathering"), 30, f"all are asked to stop: {job.output()[-2000:]}")
    job.open_gate(10)
    assert outer.wait(60) == 128 + signal.SIGTERM, job.output()[-3000:]
    assert not job.of("rolled_back")
    assert [event["rank"] for event in job.of("finished")] == [-1, -1], "both have left in order"
    wait_until(lambda: all(map(is_gone, family)), 10, "nothing of it stays")
