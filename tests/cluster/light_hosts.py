"""Light-weight hosts: real memberships on a real etcd, whose workers are records that do as workers do.

All hosts of a scenario live on one event loop in this process. What blocks for long in a scenario (starting an etcd)
belongs on a thread (`asyncio.to_thread`): else all hosts stand still with it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.waiting import until
from torchelastic.agent.membership import Membership
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.records import JoinRequest, Keys, Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.view import Settings
from torchelastic.rendezvous.worker_rules import asks, asks_again

#: The shortest time to live that a single etcd of the tests grants is 1 s, one of a cluster as well.
TTL_S = 2.0

Endpoints = Sequence[tuple[str, int]]


class LightHost:
    """One host: its agent's membership, and workers that ask for the next group whenever theirs is over.

    Args:
        endpoints: of etcd.
        run_keys: the run's keys.
        settings: of the run.
        name: this host's.
        store: instead of one made of `endpoints`.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        run_keys: Keys,
        settings: Settings,
        name: str,
        store: CoordinationStore | None = None,
    ) -> None:
        self._of = (endpoints, run_keys, settings)
        self.name, self.agent_id = name, f"{name}-{uuid.uuid4().hex[:8]}"
        self.rounds: list[Round] = []
        self.contacts_s: list[float] = []
        self.store = EtcdStore(endpoints) if store is None else store
        self.workers: dict[str, Member] = {}
        self._waiting: set[str] = set()
        self._hung: set[str] = set()
        self.membership = Membership(
            self.store,
            run_keys,
            settings,
            host=name,
            agent_id=self.agent_id,
            on_round=self._on_round,
            on_contact=self.contacts_s.append,
            clock=time.monotonic,
        )

    @property
    def round(self) -> Round:
        """The newest round that it knows."""
        return self.membership.host.round

    @property
    def leads(self) -> bool:
        """Whether its agent decides."""
        return self.membership.host.leads

    def another(self, name: str) -> LightHost:
        """One more host of the same run, by the same way."""
        endpoints, run_keys, settings = self._of
        return LightHost(endpoints, run_keys, settings, name)

    async def start(self) -> None:
        """Connect, and take part."""
        await self.membership.start(10.0)

    def ask(self, worker: str, step: int = 0, *, failed: bool = False) -> None:
        """A worker, new or not, asks for the next group."""
        member = self.workers.get(worker, Member(worker, self.name))
        known = self.round if self.rounds else None
        status = StateStatus.COMPLETE if step else StateStatus.INITIAL
        self._declare(asks(member, known, JoinRequest("127.0.0.1:1", step, status, failed, 10.0)))
        self._waiting.add(worker)

    def lose(self, worker: str) -> None:
        """The process of a worker has ended."""
        self._waiting.discard(worker)
        self._hung.discard(worker)
        del self.workers[worker]
        self.membership.host.withdraw(worker)

    def hang(self, worker: str) -> None:
        """A worker lives, and does nothing any more of its own accord."""
        self._hung.add(worker)

    def crash(self) -> None:
        """Fall silent, for ever: every further call of the store fails, and nothing is said before."""
        self.store.close()

    def _declare(self, member: Member) -> None:
        self.workers[member.member_id] = member
        self.membership.host.declare(member)

    def _on_round(self, round_: Round) -> None:
        self.rounds.append(round_)
        for worker, member in list(self.workers.items()):
            if worker not in round_.roster or worker in self._hung:
                continue
            if worker not in self._waiting and round_.state in (RoundState.BROKEN, RoundState.GATHERING):
                # inside of a callback: the round is known by the time at which this runs
                asyncio.get_running_loop().call_soon(self._ask_if_there, worker)
            elif worker in self._waiting and round_.state is RoundState.RUNNING and round_.number >= member.ready_for:
                self._waiting.discard(worker)
            elif worker in self._waiting and (again := asks_again(member, round_)) is not None:
                asyncio.get_running_loop().call_soon(self._declare, again)

    def _ask_if_there(self, worker: str) -> None:
        if worker in self.workers:
            self.ask(worker, self.workers[worker].step)


Scenario = Callable[[list[LightHost]], Awaitable[Any]]


def play(
    hosts: Callable[[], list[LightHost]], scenario: Scenario, *, start: int | None = None, timeout_s: float = 100.0
) -> None:
    """Make hosts on an event loop, start them (only the first `start`, if given), run a scenario, and end them all."""

    async def run() -> None:
        made = hosts()
        try:
            await asyncio.gather(*(host.start() for host in made[:start]))
            await asyncio.wait_for(scenario(made), timeout_s)
        finally:
            await asyncio.gather(*(host.membership.stop() for host in made))

    asyncio.run(run())


async def form(hosts: Sequence[LightHost], timeout_s: float = 10.0) -> Round:
    """One new worker `w<number>` per host asks; returns the running round as soon as all hosts know it."""
    for number, host in enumerate(hosts):
        host.ask(f"w{number}")
    return await until_all_run(hosts, len(hosts), timeout_s)


async def until_all_run(hosts: Sequence[LightHost], size: int, timeout_s: float, after: int = 0) -> Round:
    """Wait until all hosts know one and the same running round of this size, with a number above `after`."""

    def agreed() -> bool:
        rounds = {host.round for host in hosts}
        (first,) = rounds if len(rounds) == 1 else (None,)
        return (
            first is not None
            and (first.state, len(first.roster)) == (RoundState.RUNNING, size)
            and first.number > after
        )

    await until(agreed, timeout_s, f"a round of {size} after {after}; now", lambda: [host.round for host in hosts])
    return hosts[0].round


def assert_nothing_happened(hosts: Sequence[LightHost], round_: Round) -> None:
    """No worker was told of anything but the round that it is in."""
    for host in hosts:
        told = {(one.number, one.state, one.roster) for one in host.rounds if one.number >= round_.number}
        assert told == {(round_.number, RoundState.RUNNING, round_.roster)}, f"{host.name} was told of {told}"


async def lose_one_and_go_on(hosts: Sequence[LightHost], timeout_s: float) -> Round:
    """Membership works: a worker is lost, the others make the next round; then a new one comes in."""
    number, host = hosts[0].round.number, hosts[-1]
    host.lose(next(iter(host.workers)))
    after = await until_all_run(hosts, len(hosts) - 1, timeout_s, after=number)
    host.ask("newcomer")
    return await until_all_run(hosts, len(hosts), timeout_s, after=after.number)
