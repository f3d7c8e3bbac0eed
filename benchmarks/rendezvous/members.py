"""Light-weight members of torchelastic: one host each, many in one process, on one connection to a real etcd."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.rendezvous.counting import CountingStore
from benchmarks.rendezvous.crowd import Answer
from torchelastic.agent.membership import Membership
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.view import Settings

KEYS = Keys("/torchelastic/rendezvous-benchmark")
START_LIMIT_S = 120.0
#: Hosts of one process that register at the same time. All hosts of a cluster have a core each for that; these do not.
STARTS_AT_ONCE = 8
#: Long enough that the signs of life of hundreds of hosts do not fill the two cores on which they are.
TTL_S = 60.0


def serve(pipe: Connection, _number: int, endpoint: str, own: range, members: int) -> None:
    """Be the hosts `own` of a run of so many members, and do what the parent says."""
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"  # etcd3 asks for it, before its import
    from torchelastic.rendezvous.etcd import EtcdStore

    host, port = endpoint.rsplit(":", 1)
    store = CountingStore(EtcdStore([(host, int(port))], timeout_s=START_LIMIT_S))
    asyncio.run(_obey(pipe, _Hosts(store, own, members)))


async def _obey(pipe: Connection, hosts: _Hosts) -> None:
    loop = asyncio.get_running_loop()
    while True:
        command = await loop.run_in_executor(None, pipe.recv)
        if command == "start":
            answer = await hosts.start()
        elif command == "counts":
            answer = hosts.store.take()
        else:
            answer = await hosts.have_a_round(command)
        pipe.send(answer)


class _Hosts:
    """All hosts of one process."""

    def __init__(self, store: CountingStore, own: range, members: int) -> None:
        self.store = store
        self._all_there = asyncio.Event()
        self._missing = 0
        self._hosts = [_Host(store, index, members, self._on_formed) for index in own]

    async def start(self) -> Answer:
        """Find etcd and register, as an agent does before any worker asks for a round."""
        released_s = time.monotonic()
        waves = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start_one(host: _Host) -> None:
            async with waves:
                await host.start()

        await asyncio.gather(*(start_one(host) for host in self._hosts))
        return {"released_s": released_s, "ended_s": time.monotonic()}

    async def have_a_round(self, command: str) -> Answer:
        """Until every member here has heard of the next running round.

        Args:
            command: "first" and "again": all ask for it at once. "survive": they ask when they hear that the round is
                broken. "replace": so do they here, and the last of them ends and another one comes in its place.
        """
        self._all_there.clear()
        self._missing = len(self._hosts)
        for host in self._hosts:
            host.expect_the_next_round()
        released_s = time.monotonic()
        if command in ("first", "again"):
            for host in self._hosts:
                host.ask(failed=command == "again")
        elif command == "replace":
            self._hosts[-1].replace_member()
        await self._all_there.wait()
        return {"released_s": released_s, "ended_s": max(host.heard_s for host in self._hosts)}

    def _on_formed(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._all_there.set()


class _Host:
    """One host with one member. Names are as long as they are in clusters; the id is formed as an agent forms it."""

    def __init__(self, store: CountingStore, index: int, members: int, on_formed: Callable[[], None]) -> None:
        self.heard_s = 0.0
        self._on_formed = on_formed
        self._name = f"node-{index:05d}.cluster.internal"
        self._address = f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}:40000"
        self._incarnation = f"{index * 2654435761 & 0xFFFFFFFF:08x}"  # a random word in life: no use to compress it
        self._count = 1
        self._wanted = self._asked_for = 0
        self._registered = asyncio.Event()
        self.membership = Membership(
            store,
            KEYS,
            Settings(min_workers=members, max_workers=members, ttl_s=TTL_S),
            host=self._name,
            agent_id=f"{self._name}-{self._incarnation}",
            on_round=self._on_round,
            on_contact=lambda _sent_s: self._registered.set(),
            clock=time.monotonic,
        )

    async def start(self) -> None:
        """Until the host has its lease, its key and its watches; one of all hosts leads by then."""
        await self.membership.start(START_LIMIT_S)
        await self._registered.wait()

    def expect_the_next_round(self) -> None:
        """Nobody has heard of it yet."""
        self._wanted, self._asked_for = self.membership.host.round.number + 1, 0

    def ask(self, failed: bool) -> None:
        """The member wants the next round: at first for the first time, then because a step failed."""
        self._asked_for = self._wanted
        state_status = StateStatus.COMPLETE if failed else StateStatus.INITIAL
        step = 1000 * self._wanted if failed else 0
        self.membership.host.declare(
            Member(self._member_id, self._name, self._address, self._wanted, step, state_status, failed=failed)
        )

    def replace_member(self) -> None:
        """The member ends; another one asks as soon as the host hears that the round is broken, as a spare would."""
        self.membership.host.withdraw(self._member_id)
        self._count += 1

    @property
    def _member_id(self) -> str:
        return f"{self._name}-0-{self._incarnation}{self._count}"

    def _on_round(self, round_: Round) -> None:
        if round_.state is RoundState.RUNNING and round_.number == self._wanted and self._member_id in round_.roster:
            self.heard_s = time.monotonic()
            self._wanted = 0  # once
            self._on_formed()
        elif round_.state is RoundState.BROKEN and self._asked_for < self._wanted:
            self.ask(failed=True)
