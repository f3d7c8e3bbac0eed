"""An error that nobody foresaw in a task of the agent is logged with its traceback, and the task begins anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.memory_store import MemoryStore
from tests.waiting import until
from torchelastic.agent import tasks
from torchelastic.agent.membership import Membership
from torchelastic.agent.tasks import keep_running
from torchelastic.rendezvous.protocol import advance
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState
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
        return self.membership.host.round

    def member(self, name: str, **fields: Any) -> None:
        base = Member(name, "host", store_address="h:1", ready_for=self.round.number + 1)
        self.membership.host.declare(replace(base, **fields))


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

    asyncio.run(run())


TWO = Settings(2, 2)


async def form(agents: list[Agent]) -> None:
    """Bring a round of one member per agent about."""
    for number, agent in enumerate(agents):
        agent.member(f"m{number}")
    await until(lambda: all(agent.round.state is RoundState.RUNNING for agent in agents))


class Fault:
    """Makes the protocol fail so many times from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.raised = 0

        def fails(*arguments: Any) -> Any:
            if self.left:
                self.left, self.raised = self.left - 1, self.raised + 1
                raise OverflowError("an error that nobody foresaw")
            return advance(*arguments)

        monkeypatch.setattr("torchelastic.rendezvous.leadership.advance", fails)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The types of the errors that were logged with their tracebacks."""
    return [record.exc_info[0].__name__ for record in caplog.records if record.exc_info and record.exc_info[0]]


def test_a_leader_whose_session_fails_gives_the_leadership_to_another_agent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch)

    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        await form(agents)
        leader = next(agent for agent in agents if agent.membership.host.leads)
        other = next(agent for agent in agents if not agent.membership.host.leads)
        fault.left = 1
        other.membership.host.withdraw(f"m{agents.index(other)}")
        await until(lambda: other.membership.host.leads)
        assert not leader.membership.host.leads
        kv = store.get(KEYS.leader)
        assert kv is not None
        assert kv.value == f"agent-{agents.index(other)}".encode()
        await until(lambda: all(agent.round.state is RoundState.BROKEN for agent in agents))
        other.member("m-new")
        leader.member(f"m{agents.index(leader)}")
        await until(lambda: leader.round.number == 2)
        assert leader.membership.host.members, "its member was registered all the time"

    with_agents(2, scenario, TWO)
    assert fault.raised == 1
    assert tracebacks(caplog) == ["OverflowError"]
    assert "this agent stops leading run" in caplog.text


def test_the_only_agent_goes_on_after_its_session_has_failed_again_and_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch)

    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        (agent,) = agents
        fault.left = 3
        agent.member("m0")
        agent.member("m1")
        await until(lambda: agent.round.state is RoundState.RUNNING)
        assert sorted(agent.round.roster) == ["m0", "m1"]

    with_agents(1, scenario, TWO)
    assert fault.raised == 3
    assert tracebacks(caplog) == ["OverflowError"] * 3


def test_an_error_in_a_sign_of_life_does_not_cost_the_lease(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: MemoryStore, agents: list[Agent]) -> None:
        (agent,) = agents
        agent.member("m0")
        agent.member("m1")
        await until(lambda: agent.round.state is RoundState.RUNNING)
        asked = []

        def fails(lease_id: int) -> float:
            asked.append(lease_id)
            if len(asked) == 1:
                raise OverflowError("an error that nobody foresaw")
            return keep_alive(lease_id)

        keep_alive = agent.store.keep_alive
        monkeypatch.setattr(agent.store, "keep_alive", fails)
        await until(lambda: len(asked) > 6)  # more than a time to live
        assert store.get(KEYS.member("m0")) is not None
        assert len(set(asked)) == 1, "it is the same lease"

    with_agents(1, scenario, TWO)
    assert tracebacks(caplog) == ["OverflowError"]
    assert "registering again" not in caplog.text


def test_a_failed_clean_up_is_logged_too_and_ending_the_task_ends_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    began: list[int] = []

    async def work() -> None:
        began.append(len(began))
        if len(began) < 4:
            raise KeyError("an error that nobody foresaw")
        await asyncio.sleep(600)

    async def clean_up() -> None:
        raise StoreUnavailableError("no answer")

    async def run() -> None:
        task = asyncio.ensure_future(keep_running("the work", work, clean_up))
        await until(lambda: len(began) == 4)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())
    assert tracebacks(caplog) == ["KeyError", "StoreUnavailableError"] * 3
