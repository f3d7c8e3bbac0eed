"""Requests that were applied though nobody heard the answer, or that come late: each has its effect once or not at all.

A proxy between one host and etcd chooses the request by its bytes, lets it through and swallows the answer (or holds it
back and delivers it when its sender has long gone on), and then resets the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.cluster.harness import RunRecords
from tests.cluster.light_hosts import TTL_S, LightHost, form, play, until_all_run
from tests.cluster.proxy import Proxy
from tests.waiting import until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.view import Settings

#: Others of this class run every day: an etcd that is away, and garbage in it.
pytestmark = pytest.mark.long

#: A session that failed is followed by the next one after 50 to 150 ms.
NEXT_SESSION_S = 5.0

Run = Callable[[LightHost, LightHost, Proxy], Awaitable[None]]


def with_a_host_behind_a_proxy(etcd: EtcdServer, records: RunRecords, scenario: Run, leader: str = "near") -> None:
    """Two hosts of a run; "near" reaches etcd by way of a proxy. The one called `leader` leads."""

    async def run(hosts: list[LightHost]) -> None:
        (first, second) = sorted(hosts, key=lambda host: host.name != leader)
        await first.start()
        await until(lambda: first.leads, NEXT_SESSION_S, f"{first.name} leads")
        await second.start()
        await scenario(hosts[0], hosts[1], proxy)
        assert not proxy.is_waiting, "the fault did not happen"

    with Proxy((etcd.host, etcd.port)) as proxy:
        make = partial(LightHost, run_keys=records.keys, settings=Settings(2, 2, ttl_s=TTL_S))
        play(lambda: [make([proxy.endpoint], name="near"), make([(etcd.host, etcd.port)], name="far")], run, start=0)


async def seen_and_done(proxy: Proxy, is_done: Callable[[], bool], what: str) -> None:
    """The request has passed the proxy, and etcd has done it: now its sender loses the connection."""
    await until(proxy.found.is_set, NEXT_SESSION_S, f"{what} passes the proxy")
    await until(is_done, NEXT_SESSION_S, f"{what} is done")
    await asyncio.to_thread(proxy.reset)


def assert_each_round_was_written_once(records: RunRecords) -> None:
    ages = [
        (word["number"], word["edition"])
        for word in (json.loads(one.value) for one in records.history(records.keys.round))
    ]
    assert ages == sorted(set(ages)), f"a round was written twice: {ages}"


async def change_members(hosts: list[LightHost], timeout_s: float) -> None:
    """The run goes on: a worker is lost and another comes, and all hosts know their round."""
    number = hosts[0].round.number
    hosts[1].lose(next(iter(hosts[1].workers)))
    hosts[1].ask("newcomer")
    await until_all_run(hosts, 2, timeout_s, after=number)


def test_a_round_that_was_written_though_its_leader_never_heard_so_is_written_once_and_known_to_all_within_5_s(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(near: LightHost, far: LightHost, proxy: Proxy) -> None:
        proxy.lose_answer_of(lambda sent: b'"roster":["w' in sent)
        near.ask("w0")
        far.ask("w1")
        await seen_and_done(proxy, lambda: far.round.number == 1, "the round")
        assert near.round.number == 0, "the leader had its answer"
        await until_all_run([near, far], 2, NEXT_SESSION_S)
        await change_members([near, far], NEXT_SESSION_S)
        assert_each_round_was_written_once(records)
        assert len(records.terms()) == 1, "the leader changed"

    with_a_host_behind_a_proxy(etcd, records, scenario)


def test_a_member_that_was_written_though_its_host_never_heard_so_keeps_its_place_and_is_in_a_group_within_5_s(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(near: LightHost, far: LightHost, proxy: Proxy) -> None:
        proxy.lose_answer_of(lambda sent: b'"ready_for":' in sent)
        near.ask("w0")
        await seen_and_done(proxy, lambda: records.members() == ["w0"], "the record")
        far.ask("w1")
        round_ = await until_all_run([near, far], 2, NEXT_SESSION_S)
        assert (round_.number, set(round_.roster)) == (1, {"w0", "w1"})
        written = records.history(records.keys.member("w0"))
        assert {one.create_revision for one in written} == {written[0].create_revision}, "its arrival was counted anew"
        assert {one.value for one in written} == {written[0].value}, "saying it again changed it"
        await change_members([near, far], NEXT_SESSION_S)
        assert_each_round_was_written_once(records)

    with_a_host_behind_a_proxy(etcd, records, scenario)


def test_an_agent_that_was_made_leader_though_it_never_heard_so_leads_within_5_s_in_one_term(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(near: LightHost, far: LightHost, proxy: Proxy) -> None:
        await form([near, far])
        candidate = near.agent_id.encode()
        # a put of the leader's key: key, tag and length of the value, value
        proxy.lose_answer_of(
            lambda sent: b"%s\x12%c%s" % (records.keys.leader.encode(), len(candidate), candidate) in sent
        )
        await far.membership.stop()
        await seen_and_done(proxy, lambda: records.leader() == near.agent_id, "the candidacy")
        assert not near.leads, "it had its answer"
        await until(lambda: near.leads, NEXT_SESSION_S, "it leads")
        assert len(records.terms()) == 2, "it stood for leader twice"
        near.ask("newcomer")
        round_ = await until_all_run([near], 2, NEXT_SESSION_S, after=1)
        assert set(round_.roster) == {"w0", "newcomer"}
        assert_each_round_was_written_once(records)

    with_a_host_behind_a_proxy(etcd, records, scenario, leader="far")


# --- late -------------------------------------------------------------------------------------------------------------


def test_a_round_that_reaches_etcd_when_its_leader_has_already_written_the_next_has_no_effect(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(near: LightHost, far: LightHost, proxy: Proxy) -> None:
        proxy.hold(lambda sent: b'"roster":["w' in sent)
        near.ask("w0")
        far.ask("w1")
        await seen_and_done(proxy, lambda: True, "the round")
        await until_all_run([near, far], 2, NEXT_SESSION_S)
        await change_members([near, far], NEXT_SESSION_S)
        before = records.history(records.keys.round)
        await asyncio.to_thread(proxy.deliver)
        assert records.history(records.keys.round) == before, "a round came back from the past"
        assert_each_round_was_written_once(records)

    with_a_host_behind_a_proxy(etcd, records, scenario)


def test_a_members_record_that_reaches_etcd_when_the_member_is_long_gone_does_not_bring_it_back(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(near: LightHost, far: LightHost, proxy: Proxy) -> None:
        proxy.hold(lambda sent: b'"ready_for":' in sent)
        near.ask("w0")
        await seen_and_done(proxy, lambda: True, "the record")
        far.ask("w1")
        await until_all_run([near, far], 2, NEXT_SESSION_S)
        near.lose("w0")
        near.ask("w2")
        await until_all_run([near, far], 2, NEXT_SESSION_S, after=1)
        await change_members([near, far], NEXT_SESSION_S)  # a tombstone stays one round more than its member
        await until(lambda: "w0" not in records.members(), NEXT_SESSION_S, "the tombstone is cleared away")
        await asyncio.to_thread(proxy.deliver)
        assert "w0" not in records.members(), "the dead came back"

    with_a_host_behind_a_proxy(etcd, records, scenario)
