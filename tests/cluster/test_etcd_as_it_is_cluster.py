"""An etcd of three members, of which one is killed at the worst moments: the run gets by with the other two."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.etcd_cluster import Cluster, running_cluster
from tests.cluster.harness import RunRecords
from tests.cluster.light_hosts import (
    TTL_S,
    LightHost,
    assert_nothing_happened,
    form,
    lose_one_and_go_on,
    play,
    until_all_run,
)
from tests.waiting import until
from torchelastic.rendezvous.records import RoundState
from torchelastic.rendezvous.view import Settings

#: Others of this class run every day: an etcd that is away, and garbage in it.
pytestmark = pytest.mark.long

#: A new etcd leader within a second; a call that finds its member gone goes to the next one; a session or two.
WITHOUT_A_MEMBER_S = 10.0
HOSTS = 4
SETTINGS = Settings(HOSTS - 1, HOSTS, last_call_s=30.0, ttl_s=TTL_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for this module."""
    with running_cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """The cluster in its full strength."""
    for member in range(3):
        if not shared.is_alive(member):
            shared.restart(member)
    shared.wait_until_healthy()
    return shared


@dataclass
class Case:
    """Who is killed, and to whom all hosts are connected."""

    cluster: Cluster
    records: RunRecords
    victim: int
    first: int

    def hosts(self) -> list[LightHost]:
        endpoints = [self.cluster.endpoints[(self.first + n) % 3] for n in range(3)]
        return [LightHost(endpoints, self.records.keys, SETTINGS, f"host-{n}") for n in range(HOSTS)]

    async def kill(self) -> None:
        """Kill the victim, to or behind which all hosts are connected at this moment."""
        clients = await asyncio.to_thread(self.cluster.clients_of, self.first)
        assert clients.count(os.getpid()) >= HOSTS, "the hosts are connected elsewhere"
        await asyncio.to_thread(self.cluster.kill, self.victim)
        assert not self.cluster.is_alive(self.victim)


CASES = [
    "the leader, to which all are connected",
    pytest.param("a follower, to which all are connected", marks=pytest.mark.slow),
    pytest.param("the leader, behind the follower to which all are connected", marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, cluster: Cluster, run_id: str) -> Case:
    leader = cluster.leader()
    follower = (leader + 1) % 3
    victim = follower if request.param.startswith("a follower") else leader
    first = leader if request.param.startswith("the leader, to") else follower
    witness = next(member for member in range(3) if member not in (victim, first))
    return Case(cluster, RunRecords(cluster.endpoint(witness), run_id), victim, first)


def test_a_member_of_etcd_killed_while_workers_gather_delays_their_group_by_10_s_at_most(case: Case) -> None:
    async def scenario(hosts: list[LightHost]) -> None:
        for number, host in enumerate(hosts[:2]):
            host.ask(f"w{number}")
        await until(lambda: case.records.members() == ["w0", "w1"], WITHOUT_A_MEMBER_S, "two have come")
        await case.kill()
        for number, host in enumerate(hosts[2:], start=2):
            host.ask(f"w{number}")
        await until_all_run(hosts, HOSTS, WITHOUT_A_MEMBER_S)
        await lose_one_and_go_on(hosts, WITHOUT_A_MEMBER_S)

    play(case.hosts, scenario)


def test_a_member_of_etcd_killed_while_a_group_trains_costs_no_round_and_changes_go_on_within_10_s(case: Case) -> None:
    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        await case.kill()
        killed_s = time.monotonic()
        await until(
            lambda: all(host.contacts_s[-1] > killed_s for host in hosts), WITHOUT_A_MEMBER_S, "all have failed over"
        )
        await asyncio.sleep(2 * TTL_S)
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, WITHOUT_A_MEMBER_S)

    play(case.hosts, scenario)


def test_a_member_of_etcd_killed_while_workers_form_anew_delays_their_group_by_10_s_at_most(case: Case) -> None:
    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        hosts[0].hang("w0")  # for it the others wait
        hosts[-1].lose(f"w{HOSTS - 1}")
        await until(lambda: {host.round.state for host in hosts} == {RoundState.BROKEN}, WITHOUT_A_MEMBER_S, "broken")
        await case.kill()
        assert {host.round.number for host in hosts} == {round_.number}, "the next round was there before the fault"
        hosts[0].ask("w0", failed=True)
        after = await until_all_run(hosts, HOSTS - 1, WITHOUT_A_MEMBER_S, after=round_.number)
        assert (after.number, set(after.roster)) == (round_.number + 1, {"w0", "w1", "w2"})

    play(case.hosts, scenario)


def test_hosts_whose_first_endpoint_is_dead_from_the_start_meet_at_the_next_one_within_10_s(
    cluster: Cluster, run_id: str
) -> None:
    dead = cluster.leader()
    others = [(dead + 1) % 3, (dead + 2) % 3]
    cluster.kill(dead)
    records = RunRecords(cluster.endpoint(others[0]), run_id)
    endpoints = [cluster.endpoints[member] for member in (dead, *others)]

    async def scenario(hosts: list[LightHost]) -> None:
        await form(hosts, WITHOUT_A_MEMBER_S)
        assert cluster.clients_of(others[0]).count(os.getpid()) >= HOSTS, "they did not keep to the list's order"
        assert not cluster.is_alive(dead)

    cluster.leader()  # there is another
    play(lambda: [LightHost(endpoints, records.keys, SETTINGS, f"host-{n}") for n in range(HOSTS)], scenario)


@pytest.mark.slow
def test_a_rolling_restart_of_all_three_members_costs_no_round(cluster: Cluster, run_id: str) -> None:
    records = RunRecords(cluster.endpoint(0), run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        for member in range(3):
            await asyncio.to_thread(cluster.kill, member)
            killed_s = time.monotonic()
            await until(
                lambda since_s=killed_s: all(host.contacts_s[-1] > since_s for host in hosts),  # type: ignore[misc]
                WITHOUT_A_MEMBER_S,
                "all have failed over",
            )
            await asyncio.to_thread(cluster.restart, member)
        await asyncio.sleep(TTL_S)
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, WITHOUT_A_MEMBER_S)

    play(lambda: [LightHost(cluster.endpoints, records.keys, SETTINGS, f"host-{n}") for n in range(HOSTS)], scenario)


# --- with training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_goes_on_identically_when_the_etcd_member_behind_it_is_killed_and_then_a_worker(
    cluster: Cluster, run_id: str, jobs: MakeJob
) -> None:
    job = jobs(wait_for_newcomer_at=[25], step_ms=30)
    agent = job.start(f"--rdzv-endpoint={cluster.endpoint_list}", f"--rdzv-id={run_id}", "--min-workers=1")
    job.wait_for_step(5)
    (member,) = [member for member in range(3) if agent.pid in cluster.clients_of(member)]
    cluster.kill(member)
    job.wait_for_step(15)
    assert {event["round"] for event in job.of("committed")} == {1}, "losing a member of etcd cost a round"
    killed = job.kill_worker(1)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=3)
    assert killed not in {event["pid"] for event in job.of("finished")}
    assert list(job.rounds().values()) == [3, 2, 3]


@pytest.mark.slow
def test_training_goes_on_identically_when_the_leader_of_etcd_is_killed_while_workers_gather_and_while_they_form_anew(
    cluster: Cluster, run_id: str, jobs: MakeJob
) -> None:
    job = jobs(wait_for_newcomer_at=[20], gates=[10], step_ms=20)
    options = (f"--rdzv-endpoint={cluster.endpoint_list}", f"--rdzv-id={run_id}", "--min-workers=3", "--max-workers=4")
    job.start(*options, "--last-call=1", nproc=2)
    job.wait_for("asking", count=2)
    first = cluster.leader()
    cluster.kill(first)
    job.start(*options, "--last-call=1", nproc=2)
    job.wait_for("held", count=4, step=10, timeout_s=60)
    cluster.restart(first)
    second = cluster.leader()
    pid = job.kill_worker(0)
    cluster.kill(second)
    job.open_gate(10)
    assert job.wait() == [0, 0], job.output()[-4000:]
    job.check_identity()
    assert pid not in {event["pid"] for event in job.of("finished")}
    assert first != second or not cluster.is_alive(second)
