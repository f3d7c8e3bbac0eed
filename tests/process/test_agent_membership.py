"""Agents in one process on a store in memory: who leads, what reaches the store, what an outage costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from tests.memory_store import MemoryStore
from torchelastic.agent.membership import Membership
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, Standing, encode_round
from torchelastic.rendezvous.store import StoreUnavailableError
from torchelastic.rendezvous.view import Settings

KEYS = Keys("/torchelastic/test")


class Agent:
    """One agent's membership, and the rounds that it has told of."""

    def __init__(self, store: MemoryStore, name: str, settings: Settings) -> None:
        self.rounds: list[Round] = []
        self.store = store.connect()
        self.membership = Membership(
            self.store,
            KEYS,
            replace(settings, ttl_s=2.0),
            host=f"host-{name}",
            agent_id=name,
            on_round=self.rounds.append,
            clock=time.monotonic,
        )

    @property
    def round(self) -> Round:
        return self.membership.round

    def member(self, name: str, **fields: Any) -> None:
        base = Member(name, "host", store_address="h:1", ready_for=self.round.number + 1)
        self.membership.declare(replace(base, **fields))


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.01)


def with_agents(
    count: int, scenario: Callable[[MemoryStore, list[Agent]], Awaitable[None]], settings: Settings
) -> None:
    """Run a scenario with so many agents on one store."""

    async def run() -> None:
        store = MemoryStore()
        agents = [Agent(store, f"agent-{number}", settings) for number in range(count)]
        for agent in agents:
            await agent.membership.start(5.0)
        try:
            await scenario(store, agents)
        finally:
            for agent in agents:
                await agent.membership.stop()
            store.close()

    coroutine: Coroutine[Any, Any, None] = run()
    asyncio.run(coroutine)


TWO = Settings(2, 2)


async def form(agents: list[Agent]) -> None:
    """Bring a round of one member per agent about."""
    for number, agent in enumerate(agents):
        agent.member(f"m{number}")
    await until(lambda: all(agent.round.state is RoundState.RUNNING for agent in agents))


def test_exactly_one_agent_leads_and_all_hear_of_the_round() -> None:
    async def scenario(_store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        assert [agent.membership.leads for agent in agents].count(True) == 1
        assert agents[0].round == agents[1].round
        assert sorted(agents[0].round.roster) == ["m0", "m1"]

    with_agents(2, scenario, TWO)


def test_a_withdrawn_member_breaks_the_round_for_all_within_milliseconds() -> None:
    async def scenario(_store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        agents[1].membership.withdraw("m1")
        await until(lambda: all(agent.round.state is RoundState.BROKEN for agent in agents), 1.0)

    with_agents(2, scenario, TWO)


def test_when_the_leader_leaves_another_takes_over_and_the_rounds_go_on() -> None:
    async def scenario(_store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        leader = next(agent for agent in agents if agent.membership.leads)
        other = next(agent for agent in agents if not agent.membership.leads)
        await leader.membership.stop()
        await until(lambda: other.membership.leads)
        await until(lambda: other.round.state is RoundState.BROKEN)
        survivor = f"m{agents.index(other)}"
        other.member(survivor)
        other.member("m-new")
        await until(lambda: other.round.number == 2)
        assert set(other.round.roster) == {survivor, "m-new"}

    with_agents(2, scenario, TWO)


def test_a_leader_that_was_replaced_decides_nothing() -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        (agent,) = agents
        agent.member("m0")
        agent.member("m1")
        await until(lambda: agent.round.state is RoundState.RUNNING)
        # while it was paused its key was lost and somebody else leads and has published
        store.delete(KEYS.leader)
        store.put(KEYS.leader, b"somebody-else", store.grant_lease(60.0).lease_id)
        foreign = Round(9, RoundState.RUNNING, ("x", "y"), "h:1", because="by the new leader")
        store.put(KEYS.round, encode_round(foreign))
        agent.membership.withdraw("m0")
        await until(lambda: agent.round.number == 9)
        await agent.membership.until_written()
        kv = store.get(KEYS.round)
        assert kv is not None
        assert kv.value == encode_round(foreign), "the old leader wrote over the new one's round"

    with_agents(1, scenario, TWO)


def test_an_outage_freezes_membership_and_what_happened_in_it_is_written_afterwards() -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        store.stop()
        agents[1].membership.withdraw("m1")
        await asyncio.sleep(0.3)
        assert all(agent.round.state is RoundState.RUNNING for agent in agents), "nobody decides during an outage"
        store.start()
        await until(lambda: all(agent.round.state is RoundState.BROKEN for agent in agents))

    with_agents(2, scenario, TWO)


def test_a_lost_lease_is_taken_anew_with_all_its_members() -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        kv = store.get(KEYS.member("m0"))
        assert kv is not None
        store.revoke_lease(kv.lease_id)
        await until(lambda: store.get(KEYS.member("m0")) is not None)
        again = store.get(KEYS.member("m0"))
        assert again is not None
        assert again.lease_id != kv.lease_id

    with_agents(2, scenario, TWO)


def test_garbage_under_the_prefix_is_reported_and_ignored(caplog: Any) -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        store.put(KEYS.member("garbage"), b"\x80\x04not json")
        await form(agents)
        assert "garbage" not in agents[0].round.roster
        store.put(KEYS.round, b"[]")
        await until(lambda: "/torchelastic/test/round: list where an object should be" in caplog.text)
        assert agents[0].round.number == 1

    with_agents(2, scenario, TWO)
    assert "garbage does not hold JSON" in caplog.text


def test_a_closed_round_does_not_stay_in_the_store_for_ever() -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        (agent,) = agents
        agent.member("m0")
        agent.member("m1")
        await until(lambda: agent.round.state is RoundState.RUNNING)
        agent.member("m0", done=1, step=7, standing=Standing.WHOLE)
        agent.member("m1", done=1, step=7, standing=Standing.WHOLE)
        await asyncio.wait_for(agent.membership.until_closed(), 5.0)
        kv = store.get(KEYS.round)
        assert kv is not None
        assert kv.lease_id != 0

    with_agents(1, scenario, TWO)


def test_a_store_that_stays_out_of_reach_ends_the_start_with_its_error() -> None:
    async def run() -> None:
        store = MemoryStore()
        store.stop()
        agent = Agent(store, "agent", TWO)
        try:
            await agent.membership.start(0.3)
        except StoreUnavailableError:
            return
        finally:
            await agent.membership.stop()
        raise AssertionError("it started without a store")

    asyncio.run(run())
