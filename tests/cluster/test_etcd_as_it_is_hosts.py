"""Agents that end, with a word or without, and start again: nobody waits for a lease or for a group that is no more.

All agents of a run are on this machine, as on one host; each is a launcher with its workers.
"""

from __future__ import annotations

import base64
import json
import signal
import time

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.etcd_cluster import ask_etcd
from tests.cluster.harness import Job, RunRecords, process_tree
from tests.waiting import is_gone, wait_until
from torchelastic.rendezvous.server import EtcdServer

#: Long enough for nobody to wait for it, and for its end to be no explanation of anything.
TTL_S, ORPHAN_TIMEOUT_S = 60.0, 300.0
#: Until a process has imported torch and built its model, on a busy machine.
START_S = 40.0


def start(job: Job, etcd: EtcdServer, run_id: str, *options: str, nproc: int) -> int:
    """Start one agent; returns its pid."""
    return job.start(
        f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", f"--ttl={TTL_S:g}",
        f"--orphan-timeout={ORPHAN_TIMEOUT_S:g}", "--last-call=60", *options, nproc=nproc,
    ).pid  # fmt: skip


def agent_of(etcd: EtcdServer, records: RunRecords, pid: int) -> str:
    """The id of the agent that runs as this process, as it stands in etcd."""
    prefix = records.keys.agents
    question = {"key": _base64(prefix), "range_end": _base64(prefix[:-1] + chr(ord("/") + 1))}
    for kv in ask_etcd(etcd.endpoint, "kv/range", question).get("kvs", ()):
        if json.loads(base64.b64decode(kv["value"]))["pid"] == pid:
            return base64.b64decode(kv["key"]).decode().rpartition("/")[2]
    raise AssertionError(f"no agent of process {pid} under {prefix}")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "not the leader"])
def test_an_agent_that_is_killed_and_started_again_at_once_is_mourned_for_less_than_half_of_its_ttl(
    etcd: EtcdServer, run_id: str, jobs: MakeJob, leads: bool
) -> None:
    job = jobs(gates=[10], wait_for_newcomer_at=[20], full_world=3)
    limits = ("--min-workers=2", "--max-workers=3")
    records = RunRecords(etcd.endpoint, run_id)
    start(job, etcd, run_id, *limits, nproc=2)
    job.wait_for("asking", count=2, timeout_s=START_S)
    start(job, etcd, run_id, *limits, nproc=1)
    job.wait_for("held", count=3, step=10, timeout_s=START_S)
    victim = job.agents[0] if leads else job.agents[1]
    assert leads == (records.leader() == agent_of(etcd, records, victim.pid)), "another one leads"
    family = process_tree(victim.pid)
    victim.kill()
    victim.wait()
    killed_s = time.monotonic()
    wait_until(lambda: all(map(is_gone, family)), 5, "its workers end with it")
    start(job, etcd, run_id, *limits, nproc=2 if leads else 1)
    job.open_gate(10)
    (first, *_) = job.wait_for("formed", round=2, timeout_s=START_S + TTL_S)
    assert first["t"] - killed_s < TTL_S / 2, f"they waited {first['t'] - killed_s:.0f} s"
    # by the process that outlives the launcher, or by the next launcher, whichever is first
    assert "an earlier agent of this host was killed or crashed" in job.output()
    assert sorted(job.wait()) == [-signal.SIGKILL, 0, 0], job.output()[-4000:]
    job.check_identity(finishers=3)


@pytest.mark.long
def test_a_run_that_was_stopped_everywhere_and_is_started_again_does_not_wait_for_orphan_timeout(
    etcd: EtcdServer, run_id: str, jobs: MakeJob
) -> None:
    job = jobs(seed=5)
    records = RunRecords(etcd.endpoint, run_id)
    for _ in range(2):
        start(job, etcd, run_id, "--nnodes=2", nproc=1)
    job.wait_for_step(5)
    for agent, number in zip(job.agents, (signal.SIGTERM, signal.SIGINT), strict=True):
        agent.send_signal(number)
    assert job.wait(30) == [128 + signal.SIGTERM, 128 + signal.SIGINT]
    assert not job.final_weights(), "it was not stopped but done"
    last, state = records.rounds()[-1]
    assert state != "closed"
    started_s = time.monotonic()
    for _ in range(2):
        start(job, etcd, run_id, "--nnodes=2", nproc=1)
    formed = job.wait_for("formed", count=2, round=last + 1, timeout_s=START_S)
    waited_s = formed[-1]["t"] - max(event["t"] for event in job.of("asking") if event["t"] > started_s)
    assert waited_s < 10.0, f"they waited {waited_s:.0f} s for nobody"
    assert job.wait()[2:] == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)
