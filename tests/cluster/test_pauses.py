"""Processes that stand still for a while (SIGSTOP) and go on as if nothing had been: no work is lost, none done twice.

A worker that stands still for too long is in test_recovery.py. Each agent here stands for one host, with one worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from tests.cluster.harness import Job, RunRecords, process_tree, resume, rounds_published
from tests.waiting import pause, wait_until
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]

#: The shortest time to live that etcd grants.
TTL_S = 2.0
#: Beyond it: until etcd has seen the lease expire, a round is made and the step done again.
RECOVERY_S = 3.0
#: How soon who goes on again must be back in a group, or at its end.
RETURN_S = 15.0
#: Some 5 s of training. Who is left waits at step 80 until the third is there again.
LONG = {"epochs": 10, "step_ms": 50, "gates": [5], "wait_for_newcomer_at": [80]}


class Hosts:
    """The hosts of one run, all in step 5 of their first round, held by a gate."""

    def __init__(self, job: Job, etcd: EtcdServer, run_id: str, ttl_s: float, count: int) -> None:
        self.job, self.records = job, RunRecords(etcd.endpoint, run_id)
        self.first_revision = self.records.revision() + 1
        rendezvous = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}")
        for _ in range(count):
            job.start(*rendezvous, f"--nnodes=1:{count}", f"--ttl={ttl_s:g}", nproc=1)
        job.wait_for("held", step=5, count=count)
        assert len(self.records.members()) == count

    @property
    def leader(self) -> int:
        """The number of the agent that leads (has led first)."""
        (number,) = [n for n in range(len(self.job.agents)) if "this agent leads run" in self.job.output_of(n)]
        return number

    def worker_of(self, number: int) -> int:
        """The process of an agent's worker."""
        agent = self.job.agents[number].pid
        (pid,) = {event["pid"] for event in self.job.of("started") if psutil.Process(event["pid"]).ppid() == agent}
        return int(pid)

    def wait_for_another_group(self, since_s: float, within_s: float) -> float:
        """Wait until the others have trained a step in another round; returns how long that took."""
        first = min(float(event["t"]) for event in self.job.wait_for("committed", round=2, timeout_s=within_s + 20))
        assert first - since_s < within_s, f"the others trained again after {first - since_s:.1f} s"
        return first - since_s

    def assert_expired(self, count: int) -> None:
        """The store must have seen leases expire: so many members are left."""
        assert len(self.records.members()) == count

    def assert_all_came_back(self) -> None:
        """Everybody ends level, in the process that it began in, after one round without and one with all three."""
        assert self.job.wait(60) == [0, 0, 0], self.job.output()[-4000:]
        self.job.check_identity(finishers=3)
        assert self.job.rounds() == {1: 3, 2: 2, 3: 3}
        assert len(self.job.of("started")) == 3, "a worker was started again"


@pytest.fixture
def make_hosts(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> Callable[..., Hosts]:
    """Some hosts under way: make_hosts(ttl_s, count, **options of the job)."""
    return lambda ttl_s, count=3, **options: Hosts(jobs(**options), etcd, run_id, ttl_s, count)


# --- short pauses -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_worker_that_stands_still_for_less_than_the_collectives_time_out_only_costs_that_time(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts(TTL_S, 2, gates=[5], timeout_ms=20000)
    job, worker = hosts.job, hosts.worker_of(1)
    paused_s = pause([worker])
    job.open_gate(5)
    job.wait_for("drawn", step=5)
    wait_until(lambda: time.monotonic() > paused_s + 1.5 * TTL_S, 10, "longer than a host may be silent")
    resumed_s = resume([worker])
    assert job.wait() == [0, 0], job.output()[-4000:]
    assert not [event for event in job.of("committed") if paused_s < event["t"] < resumed_s], "trained without it"
    assert job.rounds() == {1: 2}
    assert not job.of("rolled_back")
    job.check_identity(finishers=2)


@pytest.mark.long
def test_an_agent_that_stands_still_for_less_than_its_time_to_live_is_not_noticed(
    make_hosts: Callable[..., Hosts],
) -> None:
    ttl_s = 6.0  # it shows a sign of life every 2 s: from any moment on, 4 s are left
    hosts = make_hosts(ttl_s, 2, gates=[5, 30])
    job, agent, worker = hosts.job, hosts.job.agents[hosts.leader].pid, hosts.worker_of(hosts.leader)
    leader = hosts.records.leader()
    paused_s = pause([agent])
    job.open_gate(5)
    job.wait_for("held", step=30, count=2)
    wait_until(lambda: time.monotonic() > paused_s + ttl_s / 2, 10, "longer than between two signs of life")
    resumed_s = resume([agent])
    assert job.of("committed", step=29, pid=worker)[0]["t"] < resumed_s, "its worker did not train meanwhile"
    job.open_gate(30)
    assert job.wait() == [0, 0], job.output()[-4000:]
    assert job.rounds() == {1: 2}
    assert not job.of("rolled_back")
    terms = hosts.records.terms(hosts.first_revision)
    assert [term.value for term in terms] == [leader], "another agent had to take over"
    job.check_identity(finishers=2)


# --- long pauses ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("leads", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["follower", "leader"])
def test_when_an_agent_stands_still_the_others_go_on_without_its_worker_which_joins_again_later(
    make_hosts: Callable[..., Hosts], leads: bool
) -> None:
    hosts = make_hosts(TTL_S, **LONG)
    job = hosts.job
    number = hosts.leader if leads else (hosts.leader + 1) % 3
    agent, worker = job.agents[number].pid, hosts.worker_of(number)
    paused_s = pause([agent])
    job.open_gate(5)
    hosts.wait_for_another_group(paused_s, TTL_S + RECOVERY_S)
    hosts.assert_expired(2)
    assert worker not in {event["pid"] for event in job.of("committed", round=2)}
    resumed_s = resume([agent])
    assert [event["t"] for event in job.of("committed", round=1, pid=worker)][-1] > paused_s, "it trained meanwhile"
    (returned, *_) = job.wait_for("committed", round=3, pid=worker)
    assert returned["t"] - resumed_s < RETURN_S
    hosts.assert_all_came_back()


@pytest.mark.slow
def test_when_the_leaders_host_hangs_for_20_s_the_others_train_again_within_the_bound_and_it_decides_nothing_more(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts(TTL_S, gates=[5], wait_for_newcomer_at=[20])
    job, records, number = hosts.job, hosts.records, hosts.leader
    tree = process_tree(job.agents[number].pid)
    assert hosts.worker_of(number) in tree
    old_leader = records.leader()
    paused_s = pause(tree)
    job.open_gate(5)
    hosts.wait_for_another_group(paused_s, TTL_S + RECOVERY_S)
    hosts.assert_expired(2)
    assert records.leader() not in ("", old_leader)
    wait_until(lambda: time.monotonic() > paused_s + 20.0, 30, "20 s")
    said_before = job.output_of(number)
    resumed_s = resume(tree)
    (returned, *_) = job.wait_for("committed", round=3, pid=hosts.worker_of(number))
    assert returned["t"] - resumed_s < RETURN_S
    hosts.assert_all_came_back()
    terms = records.terms(hosts.first_revision)
    assert len(terms) == 2, f"one change of leaders: {terms}"
    said_after = job.output_of(number)[len(said_before) :]
    assert not rounds_published(said_after), "who was replaced has published a round"
    others = [n for n in range(3) if n != number]
    published = [one for n in others for one in rounds_published(job.output_of(n))]
    assert published == records.rounds(since=terms[1].create_revision), "a round that the new leader did not publish"


# fails: `train` returns in the late worker as if it had finished, with rank 0 and the weights of step 5
@pytest.mark.slow
def test_a_host_that_goes_on_again_when_the_run_is_over_publishes_nothing_and_ends(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts(TTL_S, gates=[5])
    job, records, number = hosts.job, hosts.records, hosts.leader
    tree, worker = process_tree(job.agents[number].pid), hosts.worker_of(number)
    paused_s = pause(tree)
    job.open_gate(5)
    hosts.wait_for_another_group(paused_s, TTL_S + RECOVERY_S)
    others = [agent for n, agent in enumerate(job.agents) if n != number]
    assert [agent.wait(60) for agent in others] == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)
    (*_, closed) = records.history(records.keys.round, hosts.first_revision)
    assert '"closed"' in closed.value
    said_before = job.output_of(number)
    resumed_s = resume(tree)
    assert job.agents[number].wait(60) == 0, job.output_of(number)[-3000:]
    assert time.monotonic() - resumed_s < RETURN_S
    said = job.output_of(number)[len(said_before) :]
    assert "the run is closed" in said
    assert not rounds_published(said)
    assert records.history(records.keys.round, hosts.first_revision)[-1] == closed
    assert (records.leader(), records.members()) == ("", [])
    # what it holds is not what the run has come to: as a spare, it must not be taken for rank 0 of anything
    (end,) = job.of("finished", pid=worker)
    assert end["step"] < 40
    assert end["rank"] == -1
    job.check_identity(finishers=2)
