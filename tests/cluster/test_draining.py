"""Workers that leave a run in order: no step is lost, nobody waits, and who has left stays away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.harness import ROOT, Job, process_tree
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]


def at(etcd: EtcdServer, run_id: str) -> list[str]:
    """Three workers at most, and one at least; the first group is complete."""
    limits = ["--min-workers=1", "--max-workers=3", "--last-call=60"]
    return [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", *limits]


def members_of(job: Job, agent: subprocess.Popen[bytes]) -> dict[int, str]:
    """The members of the first round that are workers of this agent: names by process."""
    family = process_tree(agent.pid)
    return {event["pid"]: event["member"] for event in job.of("formed", round=1) if event["pid"] in family}


def drain(etcd: EtcdServer, run_id: str, *arguments: str) -> subprocess.Popen[str]:
    """`torchelastic drain`, as a process of its own."""
    command = [sys.executable, "-m", "torchelastic.launch", "drain"]
    command += [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def documents(job: Job) -> list[tuple[int, str, str]]:
    """Number, state and reason of every round that an agent of the job has written."""
    found = re.findall(r"INFO round (\d+) is (\w+): (.*)", job.output())
    return [(int(number), state, because) for number, state, because in found]


def wait_until_asked_to_stop(job: Job, *members: str) -> None:
    def is_asked() -> bool:
        texts = [because for _, state, because in documents(job) if state == "gathering"]
        return any("asked to leave" in text and all(name in text for name in members) for text in texts)

    wait_until(is_asked, 20, f"the others are asked to stop: {job.output()[-3000:]}")


def check_left(job: Job, *pids: int) -> None:
    """These processes have left after one and the same step, and have nothing to show; nobody was started again."""
    ends = {event["pid"]: event for event in job.of("finished") if event["rank"] < 0}
    assert set(ends) == set(pids)
    (step,) = {event["step"] for event in ends.values()}
    assert job.output().count("drained; the others go on") == len(pids)
    assert job.output().count(f"left the run in order after step {step}") == len(pids)
    assert not [event for event in job.of("started") if event["restart"] > 0]


def check_nothing_lost(job: Job) -> None:
    """No step was undone, and no round broke: nobody can have waited for a time-out."""
    assert not job.of("rolled_back")
    assert "broken" not in [state for _, state, _ in documents(job)], documents(job)


@pytest.mark.long
@pytest.mark.daily
def test_sigterm_to_a_worker_lets_it_leave_at_a_step_and_a_spare_steps_in(jobs: MakeJob) -> None:
    """Three train, one waits. The worker of rank 0 leaves: one new round, with the spare in it."""
    job = jobs(gates=[10])
    job.start("--standalone", "--max-workers=3", nproc=4)
    job.wait_for("held", count=3, step=10)
    job.wait_for("asking", count=4)
    (source,) = job.of("formed", round=1, rank=0)
    job.kill_worker(source["worker"], signal.SIGTERM)
    wait_until_asked_to_stop(job)
    job.open_gate(10)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=3)
    check_nothing_lost(job)
    check_left(job, source["pid"])
    assert job.rounds() == {1: 3, 2: 3}
    assert {event["worker"] for event in job.of("formed", round=2)} == {0, 1, 2, 3} - {source["worker"]}


@pytest.mark.long
def test_sigterm_to_an_agent_lets_all_its_workers_leave_at_one_step(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    job = jobs(gates=[10])
    stays = job.start(*at(etcd, run_id), nproc=1)
    leaves = job.start(*at(etcd, run_id), nproc=2)
    job.wait_for("held", count=3, step=10)
    members = members_of(job, leaves)
    assert len(members) == 2
    leaves.send_signal(signal.SIGTERM)
    wait_until_asked_to_stop(job, *members.values())
    job.open_gate(10)
    assert leaves.wait(60) == 128 + signal.SIGTERM
    assert stays.wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=1)
    check_nothing_lost(job)
    check_left(job, *members)
    assert "a second one ends it at once" not in job.output_of(1), "who is in a group is told, and gets no signal"
    assert job.rounds() == {1: 3, 2: 1}


@pytest.mark.long
def test_torchelastic_drain_reaches_an_agent_elsewhere_while_another_worker_dies(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    """Who is drained is gone for good, who was killed comes back, and the step of the kill is done."""
    job = jobs(gates=[10], wait_for_newcomer_at=[20], full_world=2)
    kept = job.start(*at(etcd, run_id), nproc=2)
    leaves = job.start(*at(etcd, run_id), nproc=1)
    job.wait_for("held", count=3, step=10)
    ((drained, name),) = members_of(job, leaves).items()
    stayers = members_of(job, kept)
    unknown = drain(etcd, run_id, "nobody")
    assert unknown.wait(60) == 2
    said = unknown.communicate()[1]
    assert "no member is called nobody" in said
    assert set(re.findall(r"^  (\S+)  on host", said, re.MULTILINE)) == {*stayers.values(), name}
    asking = drain(etcd, run_id, name)
    wait_until_asked_to_stop(job, name)
    os.kill(min(stayers), signal.SIGKILL)
    job.open_gate(10)
    assert asking.wait(60) == 0, asking.communicate()
    assert asking.communicate()[0] == f"{name} has left\n"
    assert leaves.wait(60) == 0, "the agent of a drained worker has nothing left to do"
    assert kept.wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=2)
    (left,) = job.of("finished", rank=-1)
    assert left["pid"] == drained
    assert job.rounds() == {1: 3, 2: 1, 3: 2}
    assert [event["restart"] for event in job.of("started")].count(1) == 1, "the one that was killed"


@pytest.mark.long
def test_a_run_that_all_leave_saves_a_checkpoint_and_goes_on_when_it_is_started_again(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    """The two agents of a job are told to stop at one moment, as a scheduler does it."""
    job = jobs(gates=[10], checkpoint_dir=tmp_path / "checkpoints", checkpoint_every=1000)
    agents = [job.start(*at(etcd, run_id), nproc=number) for number in (2, 1)]
    job.wait_for("held", count=3, step=10)
    names = [name for agent in agents for name in members_of(job, agent).values()]
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    wait_until_asked_to_stop(job, *names)
    job.open_gate(10)
    assert job.wait() == [128 + signal.SIGTERM] * 2, job.output()[-4000:]
    assert not job.of("rolled_back")
    assert not job.final_weights()
    assert job.output().count("drained; too few workers are left to go on") == 3
    (saved,) = job.of("saved")
    assert {event["step"] for event in job.of("finished")} == {saved["step"]}
    job.agents.clear()
    job.start(*at(etcd, run_id), nproc=3)
    assert job.wait() == [0], job.output()[-4000:]
    assert [event["step"] for event in job.of("loaded")] == [saved["step"]]
    job.check_identity(finishers=3)
