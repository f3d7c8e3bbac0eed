"""`torchelastic run` with a script that names a run itself, as that of 0.1 does: the launcher's run, or another one."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.conftest import MakeJob
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

CRASH = Fault("crash", "backward", worker=1, step=7)
HINT = "which its script names (init_method), and not in this launcher's"


@pytest.mark.long
def test_workers_of_a_script_that_names_the_launchers_run_are_started_again_like_any_others(
    etcd: EtcdServer, jobs: MakeJob, run_id: str
) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=8"
    job = jobs([CRASH], init_method=url, wait_for_newcomer_at=[20])
    job.start(f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=1", nproc=2)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    assert [event["restart"] for event in job.of("started", worker=1)] == [0, 1]
    job.check_identity(finishers=2)
    assert HINT not in job.output()
    assert "but `torchelastic run`, whose run it names, has max_workers=2, which counts" in job.output()


@pytest.mark.long
def test_workers_of_a_script_that_names_another_run_are_started_again_and_the_launcher_says_what_it_cannot_see(
    etcd: EtcdServer, jobs: MakeJob, run_id: str
) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=60"
    job = jobs([CRASH], init_method=url, wait_for_newcomer_at=[20])
    job.start("--standalone", nproc=2)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    assert [event["restart"] for event in job.of("started", worker=1)] == [0, 1]
    job.check_identity(finishers=2)
    assert job.output().count(HINT) == 1
    assert f"run {run_id} at {etcd.endpoint}, {HINT}" in job.output()


@pytest.mark.long
def test_the_exit_code_is_0_if_another_run_was_finished_while_its_worker_was_started_again(
    etcd: EtcdServer, jobs: MakeJob, run_id: str
) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=60"
    late = Fault("hang", "start", worker=1, incarnation=1)
    job = jobs([Fault("kill", "backward", worker=1, step=7), late], init_method=url, epochs=1)
    job.start("--standalone", nproc=2)
    (again,) = job.wait_for("started", worker=1, restart=1)
    job.wait_for("finished")
    wait_until(lambda: job.plan.struck() == [0, 1], 30, "the new process stands at its start")
    os.kill(again["pid"], signal.SIGCONT)
    assert job.wait() == [0], job.output()[-4000:]
    assert "is already closed: it was finished before this worker started" in job.output()
    assert len(job.of("started", worker=1)) == 2, "it was not started once more"
    job.check_identity(finishers=1)


@pytest.mark.long
def test_a_run_that_was_finished_before_the_launcher_came_is_a_failure_all_the_same(
    etcd: EtcdServer, jobs: MakeJob, run_id: str
) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=1"
    for code in (0, 1):
        job = jobs(init_method=url, epochs=1)
        job.start("--standalone", "--max-restarts=0", nproc=1)
        assert job.wait() == [code], job.output()[-4000:]
