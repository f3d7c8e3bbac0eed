"""`--standalone`: all of it listens on this host alone; its etcd is started again, with its data or without."""

from __future__ import annotations

import ipaddress
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job, process_tree
from tests.waiting import is_gone, wait_until
from torchelastic.rendezvous.server import find_etcd_binary

#: Until it is started again and the agent has found it, on a busy machine.
BACK_S = 30.0


def etcd_of(job: Job) -> int | None:
    """The process of the launcher's etcd."""
    found = [child.pid for child in psutil.Process(job.agents[0].pid).children() if child.name() == "etcd"]
    return found[0] if found else None


def kill_etcd(job: Job) -> int:
    pid = etcd_of(job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), 5, "etcd is dead")
    return pid


def lose_a_worker(job: Job) -> None:
    """The others go on, and a new one comes in, which the job waits for at a step; then the run finishes."""
    before = max(job.rounds())
    job.kill_worker(1)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=3)
    later = {number: world for number, world in job.rounds().items() if number > before}
    assert later in ({before + 1: 2, before + 2: 3}, {before + 1: 3})
    assert [event["restart"] for event in job.of("started", worker=1)] == [0, 1]


def check_that_nothing_listens_where_another_host_could_reach_it(job: Job) -> None:
    processes = [psutil.Process(pid) for pid in process_tree(job.agents[0].pid)]
    connections = [entry for process in processes for entry in process.net_connections("tcp")]
    listening = [entry.laddr for entry in connections if entry.status == psutil.CONN_LISTEN]
    assert len(listening) >= 2 * 3 + 1, "a store and gloo for each worker, and etcd"
    assert [one for one in listening if not ipaddress.ip_address(one.ip).is_loopback] == []


@pytest.mark.long
def test_its_own_etcd_is_started_again_after_a_kill_and_a_worker_that_is_lost_then_is_replaced(jobs: MakeJob) -> None:
    job = jobs(step_ms=40, epochs=10, wait_for_newcomer_at=[95], gates=[10])
    job.start("--standalone")
    job.wait_for("held", count=3, step=10)
    check_that_nothing_listens_where_another_host_could_reach_it(job)
    job.open_gate(10)
    killed = kill_etcd(job)
    lose_a_worker(job)
    output = job.output()
    assert "this launcher's etcd is started again, training goes on; it ended: killed by SIGKILL" in output
    assert "cannot be started again" not in output
    assert is_gone(killed)


@pytest.mark.long
def test_an_etcd_that_cannot_be_started_is_named_once_and_tried_until_it_can(jobs: MakeJob, tmp_path: Path) -> None:
    binary, broken = tmp_path / "etcd", tmp_path / "broken"
    binary.write_text(
        f'#!/bin/sh\n[ -e {broken} ] && echo "no space left" && exit 3\nexec {find_etcd_binary()} "$@"\n', "ascii"
    )
    binary.chmod(0o755)
    job = jobs(step_ms=40, epochs=20, gates=[60], wait_for_newcomer_at=[195])
    job.start("--standalone", TORCHELASTIC_ETCD_BINARY_PATH=str(binary))
    job.wait_for_step(10)
    broken.touch()
    kill_etcd(job)
    wait_until(lambda: "cannot be started again" in job.output(), BACK_S, "the launcher says so")
    job.open_gate(60)
    job.wait_for_step(70)  # it trains without
    broken.unlink()
    wait_until(lambda: "etcd is back" in job.output(), BACK_S, "etcd runs, and the agent has found it")
    lose_a_worker(job)
    output = job.output()
    assert output.count("cannot be started again") == 1
    assert "ended with status 3; its log ends with\nno space left" in output
    assert "etcd has lost its data: registering again, training goes on" in output


@pytest.mark.long
def test_its_etcd_ends_with_the_launcher_also_if_it_has_just_ended_itself(jobs: MakeJob) -> None:
    job = jobs(step_ms=40, epochs=20)
    agent = job.start("--standalone")
    job.wait_for_step(5)
    kill_etcd(job)
    agent.send_signal(signal.SIGINT)
    again = etcd_of(job)
    assert job.wait() == [130]
    assert again is None or is_gone(again)
