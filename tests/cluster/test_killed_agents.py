"""Agents that are killed: the others know at once that the workers have ended, and a restarted run does not wait."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.cluster.harness import Job, RunRecords, process_tree
from tests.cluster.test_without_launcher import agent_of
from tests.waiting import is_gone, wait_until
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]

#: A lease that is no explanation of anything that happens at once, and what "at once" is on a busy machine.
LONG_TTL_S, AT_ONCE_S = 60.0, 5.0
#: Until a process has imported torch and trains, on a busy machine.
START_S = 120.0


def start(job: Job, etcd: EtcdServer, run_id: str, *options: str, nproc: int) -> psutil.Process:
    """Start a launcher as a user does."""
    rendezvous = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--last-call=120")
    return psutil.Process(job.start(*rendezvous, *options, nproc=nproc).pid)


def departed(records: RunRecords) -> list[str]:
    """Of the present round, the members whose ends are known."""
    return list(json.loads(records.history(records.keys.round)[-1].value)["departed"])


def kill_all(job: Job) -> None:
    """SIGKILL every process of the job, whatever may outlive the launcher included, and wait until all have ended."""
    family = [pid for agent in job.agents if agent.poll() is None for pid in process_tree(agent.pid)]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    for agent in job.agents:
        agent.wait()
    wait_until(lambda: all(map(is_gone, family)), 10, "all have ended")


@pytest.mark.long
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "after the lease"])
def test_a_run_that_was_killed_as_a_whole_is_restarted_without_waiting_for_orphan_timeout(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, at_once: bool
) -> None:
    job, records = jobs(seed=5, gates=[10]), RunRecords(etcd.endpoint, run_id)
    options = ("--ttl=2", "--orphan-timeout=300")
    start(job, etcd, run_id, *options, nproc=2)
    job.wait_for("held", count=2, step=10, timeout_s=START_S)
    kill_all(job)
    killed_s = time.monotonic()
    if not at_once:
        wait_until(lambda: not records.members() and not records.leader(), 15, "the lease ends")
    assert not job.final_weights(), "it was not finished"
    job.open_gate(10)
    start(job, etcd, run_id, *options, nproc=2)
    formed = job.wait_for("formed", count=2, round=2, timeout_s=START_S)
    asked_s = max(event["t"] for event in job.of("asking") if event["t"] > killed_s)
    assert formed[-1]["t"] - asked_s < AT_ONCE_S, "nobody is left to wait for"
    assert "an earlier agent of this host was killed or crashed" in job.output_of(1)
    assert job.output_of(1).count("round 2: no worker has a state of an earlier round, and there is no checkpoint") == 1
    assert job.wait() == [-signal.SIGKILL, 0], job.output()[-4000:]
    job.check_identity(finishers=2)


@pytest.mark.long
def test_a_run_that_nobody_can_prove_dead_names_the_wait_at_once_and_goes_on_when_it_is_over(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    job, records = jobs(seed=5, gates=[10]), RunRecords(etcd.endpoint, run_id)
    start(job, etcd, run_id, "--ttl=2", "--orphan-timeout=20", nproc=2)
    job.wait_for("held", count=2, step=10, timeout_s=START_S)
    kill_all(job)
    host, _, port = etcd.endpoint.rpartition(":")
    store = EtcdStore([(host, int(port))])
    (record,) = store.list_prefix(records.keys.processes).items
    document = json.loads(record.value)
    document["place"]["boot"] = "another"  # as of another host: nothing can be proven here
    store.put(record.key, json.dumps(document).encode())
    store.close()
    wait_until(lambda: not records.members() and not records.leader(), 15, "the lease ends")
    job.open_gate(10)
    start(job, etcd, run_id, "--ttl=2", "--orphan-timeout=20", nproc=2)
    wait_until(lambda: "waiting: lost " in job.output_of(1), START_S, "the wait is named")
    said_s = time.monotonic()
    line = next(line for line in job.output_of(1).splitlines() if "waiting: lost " in line)
    assert "WARNING" in line
    assert "orphan_timeout=20 s" in line
    assert "start all launchers again with a lower --orphan-timeout" in line
    assert not job.of("formed", round=2), "it was named before it was over"
    formed = job.wait_for("formed", count=2, round=2, timeout_s=START_S)
    assert formed[0]["t"] - said_s > 15, "nothing was proven, so they have waited"
    assert job.wait() == [-signal.SIGKILL, 0], job.output()[-4000:]
    job.check_identity(finishers=2)


@pytest.mark.long
def test_a_killed_worker_without_launcher_is_lost_at_once(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    job, records = jobs(gates=[10]), RunRecords(etcd.endpoint, run_id)
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=3&last_call_timeout=120&ttl={LONG_TTL_S:g}"
    scripts = [job.start_alone(url, name) for name in ("first", "second", "third")]
    job.wait_for("held", count=3, step=10, timeout_s=START_S)
    agent = agent_of(scripts[2].pid)
    killed_s = time.monotonic()
    scripts[2].kill()
    wait_until(lambda: records.rounds()[-1] == (1, "broken"), LONG_TTL_S / 2, "the others are notified")
    assert time.monotonic() - killed_s < AT_ONCE_S
    job.open_gate(10)
    wait_until(lambda: is_gone(agent), 10, "its agent ends once it has reported")
    assert [script.wait(60) for script in scripts[:2]] == [0, 0], job.output()[-4000:]
    assert min(event["t"] for event in job.of("formed", round=2)) - killed_s < AT_ONCE_S, "the others go on"
    job.check_identity(finishers=2)


@pytest.mark.long
@pytest.mark.parametrize("agents_too", [True, False], ids=["with their agents", "alone"])
def test_scripts_without_launcher_that_were_all_killed_are_restarted_without_waiting_for_orphan_timeout(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, agents_too: bool
) -> None:
    job = jobs(seed=5, gates=[10])
    # as written for 0.1: with the defaults of ttl and orphan_timeout
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=2&max_workers=2&last_call_timeout=120"
    scripts = [job.start_alone(url, name) for name in ("first", "second")]
    job.wait_for("held", count=2, step=10, timeout_s=START_S)
    private_agents = [agent_of(script.pid) for script in scripts]
    if agents_too:
        kill_all(job)
    else:
        for script in scripts:
            script.kill()
        wait_until(lambda: all(map(is_gone, private_agents)), 10, "the agents end with their scripts")
    killed_s = time.monotonic()
    assert not job.final_weights(), "it was not finished"
    job.open_gate(10)
    again = [job.start_alone(url, name) for name in ("first again", "second again")]
    formed = job.wait_for("formed", count=2, round=2, timeout_s=START_S)
    asked_s = max(event["t"] for event in job.of("asking") if event["t"] > killed_s)
    assert formed[-1]["t"] - asked_s < 15.0, "nobody is left to wait for"
    assert [script.wait(60) for script in again] == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)


@pytest.mark.long
@pytest.mark.daily
@pytest.mark.parametrize("leads", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["leader", "not the leader"])
def test_the_workers_of_a_killed_launcher_are_lost_at_once(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, leads: bool
) -> None:
    job, records = jobs(gates=[10]), RunRecords(etcd.endpoint, run_id)
    options = ("--min-workers=1", "--max-workers=3", f"--ttl={LONG_TTL_S:g}")
    start(job, etcd, run_id, *options, nproc=2 if leads else 1)
    wait_until(records.leader, 20, "the first launcher leads")
    start(job, etcd, run_id, *options, nproc=1 if leads else 2)
    job.wait_for("held", count=3, step=10, timeout_s=START_S)
    victim, other = (0, 1) if leads else (1, 0)
    family = process_tree(job.agents[victim].pid)
    killed_s = time.monotonic()
    job.agents[victim].kill()
    wait_until(lambda: len(departed(records)) == 2, LONG_TTL_S / 2, "the others are notified")
    assert time.monotonic() - killed_s < AT_ONCE_S
    job.open_gate(10)
    assert job.agents[other].wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=1)
    wait_until(lambda: all(map(is_gone, family)), 10, "nothing of it stays")
