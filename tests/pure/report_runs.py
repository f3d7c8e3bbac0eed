"""Runs for tests of the report: workers that count as the ledger's meter does, on hosts with clocks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Head, Journal
from torchelastic.observe.ledger.ledger_events import (
    Counted,
    Drain,
    End,
    Failure,
    FirstStep,
    Join,
    LedgerEvent,
    ReForm,
    Restore,
    Save,
    Start,
    StoreOutage,
    Straggler,
)

MS = 1_000_000
#: The time of the day at 0 ms of every run.
DAY_NS = 1_700_000_000_000_000_000


@dataclass
class Host:
    """One agent; its clock runs ahead of the run's by so much."""

    name: str
    ahead_ns: int = 0
    run_id: str = "run-1"
    configured: int = 4
    events: list[LedgerEvent] = field(default_factory=list)

    def head(self) -> Head:
        return Head(self.run_id, self.name, self.ahead_ns, DAY_NS, self.configured)

    def journal(self) -> Journal:
        return Journal(self.head(), HostLedger(), tuple(self.events))

    def outage(self, from_ms: int, to_ms: int | None = None) -> None:
        self.events.append(StoreOutage(at_ns=self.ns(from_ms)))
        if to_ms is not None:
            away_ns = (to_ms - from_ms) * MS
            self.events.append(StoreOutage(at_ns=self.ns(to_ms), is_over=True, away_ns=away_ns))

    def ns(self, at_ms: int) -> int:
        return at_ms * MS + self.ahead_ns


class Worker:
    """One life. Times in milliseconds since 0 of the run. Counts are written down after each event, as agents do."""

    def __init__(self, host: Host, place: str, at_ms: int = 0) -> None:
        self.host, self.name = host, f"{host.name}-a1/{place}"
        self.tally = Counters.begun(host.ns(at_ms))
        self._noticed_ms = 0
        host.events.append(Start(at_ns=host.ns(at_ms), worker=self.name))

    def told(self, event: LedgerEvent) -> None:
        self.host.events.append(event)
        self.counted()

    def counted(self) -> None:
        tally = self.tally
        self.host.events.append(
            Counted(
                at_ns=tally.since_ns, worker=self.name, rank=tally.rank, round=tally.round, step=tally.step, tally=tally
            )
        )

    def gathers(self, at_ms: int) -> None:
        account = Account.IDLE if self.tally.round < 0 else Account.RE_FORM
        self.tally = self.tally.left(self.host.ns(at_ms), account)

    def joins(self, at_ms: int, round_: int, rank: int, world_size: int) -> None:
        is_first = self.tally.round < 0
        self.tally = self.tally.entered(self.host.ns(at_ms), round_, rank, world_size)
        self.told(Join(**self._where(), world_size=world_size, is_first=is_first))

    def synchronized(self, at_ms: int, step: int, source: str = "") -> None:
        before, self.tally = self.tally, self.tally.synchronized(self.host.ns(at_ms), step)
        self.told(
            Restore(
                **self._where(), took_ns=self.tally.since_ns - before.since_ns, from_step=before.step,
                productive_ns=self.tally.totals[Account.PRODUCTIVE], source=source,
            )
        )  # fmt: skip

    def commits(self, at_ms: int) -> None:
        self.tally = self.tally.commits(self.host.ns(at_ms))
        if self.tally.committed == 1:
            self.told(FirstStep(**self._where()))

    def saves(self, at_ms: int, stall_ms: int, tier: str = "") -> None:
        self.tally = self.tally.switched(self.host.ns(at_ms - stall_ms), Account.SAVE_STALL)
        self.tally = self.tally.switched(self.host.ns(at_ms), Account.PRODUCTIVE)
        productive_ns = self.tally.totals[Account.PRODUCTIVE]
        self.told(Save(**self._where(), stall_ns=stall_ms * MS, productive_ns=productive_ns, tier=tier))

    def waited(self, at_ms: int, waited_ms: int) -> None:
        self.tally = self.tally.waited_for_data(self.host.ns(at_ms), waited_ms * MS)

    def fails(self, at_ms: int, cause: str = "connection closed") -> None:
        at_ns = self.host.ns(at_ms)
        closed = self.tally.switched(at_ns, self.tally.account)
        pending_ns, self.tally = closed.pending_ns, self.tally.undoes(at_ns)
        self._noticed_ms = at_ms
        self.told(Failure(**self._where(), began_ns=at_ns - pending_ns, replayed_ns=pending_ns, cause=cause))

    def trains_again(
        self, at_ms: int, agree_ms: int, re_form_ms: int, sync_ms: int, cause: str = "", told_at_ms: int | None = None
    ) -> None:
        self.commits(at_ms)
        noticed_ms = self._noticed_ms if told_at_ms is None else told_at_ms
        rest_ms = at_ms - noticed_ms - agree_ms - re_form_ms - sync_ms
        phases = {"agree": agree_ms, "re_form": re_form_ms, "sync": sync_ms, "step": rest_ms}
        phases_ns = {name: ms * MS for name, ms in phases.items()}
        self.told(ReForm(**self._where(), phases_ns=phases_ns, world_size=self.tally.world_size, cause=cause))

    def straggles(self, percent: float) -> None:
        self.told(Straggler(**self._where(), relative_percent=percent))

    def over(self, at_ms: int) -> None:
        self.tally = self.tally.left(self.host.ns(at_ms), Account.IDLE)

    def drains(self, at_ms: int) -> None:
        self.tally = self.tally.left(self.host.ns(at_ms), Account.IDLE)
        self.told(Drain(**self._where()))

    def ends(self, at_ms: int, code: int = 0) -> None:
        self.counted()
        where = self._where() | {"at_ns": self.host.ns(at_ms)}
        how = f"exit code {code}" if code >= 0 else "killed by SIGKILL"
        self.host.events.append(End(**where, exit_code=code, is_loss=code != 0, cause=how))

    def _where(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "at_ns": tally.since_ns,
            "worker": self.name,
            "rank": tally.rank,
            "round": tally.round,
            "step": tally.step,
        }


def group_of(workers: Sequence[Worker], at_ms: int, round_: int, step: int, source: str = "") -> None:
    """All of them form a group, and are in sync 10 ms later."""
    for rank, worker in enumerate(workers):
        worker.joins(at_ms, round_, rank, len(workers))
    for worker in workers:
        worker.synchronized(at_ms + 10, step, source)


def steps(workers: Sequence[Worker], begin_ms: int, count: int, step_ms: int = 100) -> int:
    """So many steps; returns when the last was committed."""
    for number in range(count):
        for worker in workers:
            worker.commits(begin_ms + (number + 1) * step_ms)
    return begin_ms + count * step_ms


def killed_run(run_id: str = "run-1", ahead_ms: int = 7_000) -> list[Host]:
    """Two hosts with two workers each. One is killed 30 ms into its sixth step; its successor joins; all end at 3120.

    The second host starts 5 ms later. Start-up lasts until 490, the kill is at 1040, noticed at 1060 by one and at 1070
    by the others; the next step is committed at 1200. A save after step 3 stalls 20 ms.
    """
    hosts = [Host("alpha", 0, run_id), Host("beta", ahead_ms * MS, run_id)]
    first = [Worker(host, f"{place}.0", 5 if host is hosts[1] else 0) for host in hosts for place in (0, 1)]
    for worker in first:
        worker.gathers(490)
    group_of(first, 500, 1, 0)
    steps(first, 510, 3)
    for worker in first:
        worker.saves(830, 20, "memory")
    steps(first, 810, 2)
    lost, left = first[-1], first[:-1]
    lost.ends(1040, -9)
    for number, worker in enumerate(left):
        worker.fails(1060 if number == 0 else 1070)
    group_of(left, 1090, 2, 5, "peer")
    for worker in left:
        worker.trains_again(1200, 15, 10, 10, "beta-1 has ended (fact)")
    successor = Worker(hosts[1], "1.1", 1100)
    successor.gathers(1900)
    steps(left, 1200, 8)
    for worker in left:
        worker.gathers(2000)
    group_of([*left, successor], 2010, 3, 14, "peer")
    steps([*left, successor], 2020, 10)
    for worker in [*left, successor]:
        worker.over(3020)
        worker.ends(3120)
    return hosts


def journals_of(hosts: Sequence[Host]) -> dict[str, Journal]:
    """As they are read from disk."""
    return {f"ledger-{host.name}-a1": host.journal() for host in hosts}
