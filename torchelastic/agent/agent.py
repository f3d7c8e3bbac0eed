"""The agent of one host: joins the store, the workers' connections and the supervisor. Never imports torch."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.agent.connections import Connections
from torchelastic.agent.failure_reporter import FailureReporter, read_members
from torchelastic.agent.health_check import Admission, HealthCheck
from torchelastic.agent.host_events import (
    Dispatcher,
    Event,
    Publish,
    RoundChanged,
    StoreAnswered,
    StoreReach,
    WorkerExited,
)
from torchelastic.agent.idle_workers import IdleWorkers, WaitLimit
from torchelastic.agent.ledger_recorder import LedgerRecorder
from torchelastic.agent.membership import LEAVE_TIMEOUT_S, Membership
from torchelastic.agent.metrics_endpoint import MetricsEndpoint, dashboard
from torchelastic.agent.plain_member import host_by_host
from torchelastic.agent.status_publisher import StatusPublisher
from torchelastic.agent.supervisor import KILL_GRACE_S, Supervisor
from torchelastic.agent.tasks import keep_running
from torchelastic.agent.worker import NOTICE_SIGNALS, ORDERLY_SIGNALS, forward
from torchelastic.agent.wrong_places import WrongPlaces
from torchelastic.lifetime.requeue import STOPPED_EARLY
from torchelastic.log_lines import HUMAN, JSON
from torchelastic.network.interface_choice import InterfaceError
from torchelastic.network.interfaces import address_towards, is_loopback
from torchelastic.network.this_host import chosen_address
from torchelastic.observe.page.listening import PageOptions
from torchelastic.observe.page.page_server import PageServer
from torchelastic.processes import boot_time_s
from torchelastic.processes.exit_codes import COMPUTES_WRONG
from torchelastic.processes.lifeline import process_end
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import Keys, Round, RoundState
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.rendezvous.worker_rules import Contact

log = logging.getLogger(__name__)

#: At the first of them the workers leave in order.
DRAIN_SIGNALS = (signal.SIGTERM, *ORDERLY_SIGNALS)
#: Who ignores them when it starts this process means it: `nohup`, and a script that starts it with `&`.
MAY_BE_IGNORED = ORDERLY_SIGNALS


@dataclass(frozen=True)
class AgentOptions:
    """What one agent is started with.

    Attributes:
        url: the run.
        socket_path: where its workers connect.
        owner_pid: of a private agent: the process that it serves and ends with.
        metrics_address: (host, port) to serve Prometheus metrics at; port 0 takes any free one; None: not served.
        push_gateway: URL of a Prometheus push gateway to push them to; None: not pushed.
        term_grace_s: how long workers may take to leave the run and to end by themselves after a drain signal,
            and those that never asked for a group to end by themselves after the end of the run.
        ledger_dir: where the ledger of this host is written, see docs/ledger.md; None: it is kept in memory only.
        page: the live page, see docs/observing.md; None: not served.
        address: at which the others reach this host; empty: as the environment chooses, else on the way to etcd.
        log_form: "human" or "json": of the log of this agent and of its workers.
        health_check: decides whether this host may take part; None: nothing does.
    """

    url: RendezvousUrl
    socket_path: Path
    owner_pid: int | None = None
    metrics_address: tuple[str, int] | None = None
    push_gateway: str | None = None
    term_grace_s: float = 30.0
    ledger_dir: Path | None = None
    page: PageOptions | None = None
    address: str = ""
    log_form: str = HUMAN
    health_check: HealthCheck | None = None


@dataclass(frozen=True)
class Outcome:
    """How it ended: the exit code of the launcher, what to say last, and whether the run was over before it began.

    `detail` is more keys of the last line, for JSON.
    """

    exit_code: int
    message: str = ""
    came_late: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)


class Agent:
    """Runs until the run is over, its workers are, or its owner is.

    Args:
        options: see `AgentOptions`.
        store: a connection to the run's etcd, owned by the agent from now on.
        make_supervisor: builds the supervisor of this host's workers from (run_is_over, publish); None: a private
            agent.
    """

    def __init__(
        self,
        options: AgentOptions,
        store: CoordinationStore,
        make_supervisor: Callable[[Callable[[], bool], Publish], Supervisor] | None = None,
    ) -> None:
        self._options = options
        self._store = store
        self._make_supervisor = make_supervisor
        self.supervisor: Supervisor | None = None
        self._recorder: LedgerRecorder | None = None
        self._page: PageServer | None = None
        self._stop_signal: int | None = None
        self._draining = asyncio.Event()
        self._interrupted = asyncio.Event()

    async def run(self) -> Outcome:
        """Do everything; the event loop must run in the main thread."""
        self._build()
        self._heed_signals()
        await self.connections.start()
        try:
            address = self._options.address or chosen_address()
            self._metrics.listen(self._options.metrics_address)
            if not await self._has_started():
                await self.connections.stop()
                return self._stopped()
            # not before: until etcd has answered, its name may be known to nobody yet
            self.connections.address = address or address_towards(self._options.url.endpoints)
        except (StoreError, InterfaceError, OSError) as error:
            return await self._fail(f"{error}; the run was not started")
        self._look_at_address()
        self.connections.run_was_closed = self.membership.host.round.is_over
        if self.connections.run_was_closed and self._make_supervisor is not None:
            return self._came_late()
        self.connections.open()
        self._metrics.push(self._options.push_gateway)
        self._status.start()
        if self._page is not None:
            self._page.start()
        try:
            return await (self._serve_owner() if self._make_supervisor is None else self._run_workers())
        finally:
            if self._page is not None:  # whoever looks is told, within a bound
                await asyncio.get_running_loop().run_in_executor(None, self._page.stop)
            self._status.stop()
            await self.connections.stop()
            await self.membership.stop()
            if self.supervisor is not None:
                await self.supervisor.let_go()
            if self._recorder is not None:
                await self._recorder.stop()
            self._failures.close()
            self._admission.close()
            await self._metrics.stop()

    def _heed_signals(self) -> None:
        for number in (*DRAIN_SIGNALS, signal.SIGINT):
            if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for number in NOTICE_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_notice, number)

    async def _has_started(self) -> bool:
        """Find the store and take part; false: a signal came before. Raises StoreError."""
        starting = asyncio.ensure_future(self.membership.start(self._options.url.connect_timeout_s))
        signals = [asyncio.ensure_future(one.wait()) for one in (self._draining, self._interrupted)]
        await asyncio.wait((starting, *signals), return_when=asyncio.FIRST_COMPLETED)
        for task in signals:
            task.cancel()
        if not starting.done():
            starting.cancel()
            return False
        starting.result()
        return True

    def _look_at_address(self) -> None:
        """Warn of one that no other host reaches, where others are expected."""
        address = self.connections.address
        others = self.supervisor is not None and self._options.url.max_workers > len(self.supervisor.workers)
        if others and is_loopback(address):
            log.warning(
                "this host tells the others to reach it at %s, which no other host can: name etcd by an address that "
                "they reach too, or choose a network with --iface",
                address,
            )

    async def _fail(self, message: str) -> Outcome:
        """Nothing can be done: say so to the owner, if that is who waits, or to the person at the terminal."""
        self.connections.fail_all("unavailable", message)
        if self._options.owner_pid is not None:
            await _within(5.0, process_end(self._options.owner_pid))
            message = ""  # the owner has said it
        await self.connections.stop()
        return Outcome(1, message)

    # --- assembling -------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make the parts; they know each other by the events that they publish and act on."""
        url, keys = self._options.url, Keys(self._options.url.root)
        host, incarnation = socket.gethostname(), uuid.uuid4().hex[:8]
        events = Dispatcher()
        publish = events.publish
        self.connections = Connections(
            self._options.socket_path,
            host=host,
            incarnation=incarnation,
            clock=time.monotonic,
            publish=publish,
            until_written=lambda: self.membership.until_written(),
        )
        self.membership = Membership(
            self._store, keys, url.settings, host=host, agent_id=f"{host}-{incarnation}",
            on_round=lambda round_: publish(RoundChanged(round_)),
            on_contact=lambda sent_s: publish(StoreAnswered(sent_s, Contact.at(sent_s, url.orphan_timeout_s))),
            on_reach=lambda in_reach: publish(StoreReach(in_reach)),
            on_drain=self.connections.leave,
            processes=self.connections.processes,
            owner_pid=self._options.owner_pid,
            clock=boot_time_s,
        )  # fmt: skip
        connections = self.connections
        self._admission = Admission(self._store, keys, host, self._options.health_check)
        wait_limit = WaitLimit(
            url, publish, connections.waiting_since_s, connections.waits_for_store_since_s, self._admission.others_text
        )
        self._wrong = WrongPlaces(self._store, keys, host)
        self._metrics = MetricsEndpoint(url.run_id, host)
        self._failures = FailureReporter(incarnation, lambda: read_members(self._store, keys))
        if self._make_supervisor is not None:
            self.supervisor = self._make_supervisor(lambda: self.membership.host.round.is_over, publish)
            self._recorder = self._make_recorder(self.supervisor, host, incarnation, publish)
        self._status = StatusPublisher(
            self._store, keys, host=host, incarnation=incarnation,
            membership=self.membership, recorder=self._recorder,
            terminal=None if self.supervisor is None else self.supervisor.terminal,
            waits=wait_limit.waits_for_store,
        )  # fmt: skip
        self._subscribe(events, wait_limit)
        if self._make_supervisor is not None and self._options.page is not None:
            self._status.address = self._options.page.url
            self._page = dashboard(self._options.page, self._store, url, host, self._status.with_all_events)

    def _subscribe(self, events: Dispatcher, wait_limit: WaitLimit) -> None:
        for part in (self.connections, self.membership, wait_limit, self._status, self._metrics):
            events.subscribe(part.on_event)
        if self.supervisor is not None and self._recorder is not None:
            for one in (self._recorder, self._failures, self.supervisor, self._wrong, self):
                events.subscribe(one.on_event)

    def _make_recorder(self, supervisor: Supervisor, host: str, incarnation: str, publish: Publish) -> LedgerRecorder:
        recorder = LedgerRecorder(
            self._options.socket_path,
            run_id=self._options.url.run_id,
            host=host,
            incarnation=incarnation,
            folder=self._options.ledger_dir,
            configured_workers=self._options.url.max_workers,
            workers=lambda: supervisor.workers,
            sees_store=lambda: self.membership.host.in_reach,
            logs_each=self._options.log_form == JSON,
            publish=publish,
        )
        self._metrics.add_ledger(recorder.latest)
        return recorder

    # --- what happens -----------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """What ends workers of this host, or how they ended."""
        match event:
            case RoundChanged(round_):
                self._end_as_decided(round_)
                self._show_ranks(round_.roster)
            case WorkerExited(worker):
                worker.has_finished = worker.has_finished and self.membership.host.round.state is RoundState.CLOSED

    def _end_as_decided(self, round_: Round) -> None:
        assert self.supervisor is not None
        for member_id in round_.evicted:
            pid = self.connections.evict(member_id)
            if pid is not None:
                self.supervisor.end_hung(pid)
        if round_.hopeless and any(self.connections.is_own(name) for name in round_.roster):
            log.error("%s: the run ends", round_.because)
            self.supervisor.too_few.set()

    def _show_ranks(self, roster: Sequence[str]) -> None:
        """The lines of this host's workers may begin with their ranks."""
        assert self.supervisor is not None
        if any(worker.has_stand_in for worker in self.supervisor.workers):
            roster = host_by_host(roster)
        own = {MemberId.of(name).place: rank for rank, name in enumerate(roster) if self.connections.is_own(name)}
        self.supervisor.terminal.prefix.learn({int(place): rank for place, rank in own.items() if place.isdecimal()})

    def _on_signal(self, number: int) -> None:
        """A drain signal once: the workers leave in order. A second one but SIGHUP, or SIGINT: they are ended."""
        is_first = self._stop_signal is None
        if number == signal.SIGHUP and not is_first:  # the kernel and the shell both send it when a terminal is closed
            return
        self._stop_signal = number
        (self._draining if is_first and number in DRAIN_SIGNALS else self._interrupted).set()

    def _came_late(self) -> Outcome:
        url = self._options.url
        closed = f"run {url.run_id!r} at {url.endpoints_text} is already closed: it was finished before"
        return Outcome(1, f"{closed}; choose another run id (--rdzv-id)", came_late=True)

    def _stopped(self) -> Outcome:
        assert self._stop_signal is not None
        return Outcome(128 + self._stop_signal, f"stopped by {signal.Signals(self._stop_signal).name}")

    def _on_notice(self, number: signal.Signals) -> None:
        workers = [] if self.supervisor is None else self.supervisor.workers
        forward(number, [pid for pid in (worker.speaker for worker in workers) if pid is not None])

    # --- the two lives of an agent ----------------------------------------------------------------

    async def _serve_owner(self) -> Outcome:
        """Serve the one process that has started this agent, and end with it."""
        assert self._options.owner_pid is not None
        owner = self._options.owner_pid
        await _first_of(self._owner_is_over(owner), self._draining.wait(), self._interrupted.wait())
        if self._draining.is_set():
            self.connections.leave_all()
            patience = asyncio.sleep(self._options.term_grace_s)
            await _first_of(self._owner_is_over(owner), self._interrupted.wait(), patience)
        self.connections.process_gone(owner)
        await self._leave_in_order(self._options.url.settings.ttl_s)
        return Outcome(0)

    async def _owner_is_over(self, owner: int) -> None:
        await _first_of(process_end(owner), self.connections.emptied.wait())

    async def _run_workers(self) -> Outcome:
        """Run this host's workers to the end of the run, or of their strength."""
        assert self.supervisor is not None
        self.supervisor.skip(await self._wrong.read())
        if all(worker.computes_wrong for worker in self.supervisor.workers):
            return self._computes_wrong()
        await _first_of(self._admission.decide(), self._draining.wait(), self._interrupted.wait())
        if self._stop_signal is not None:
            return self._stopped()
        if self._admission.failure is not None:
            return Outcome(self._admission.failure.exit_code, self._admission.failure.text())
        if self.membership.host.round.is_over:  # while the check ran
            return self._came_late()
        self.supervisor.start()
        if self._recorder is not None:
            self._recorder.start()
        grace_s = self._options.term_grace_s
        idle = IdleWorkers(self.supervisor, self.connections.members, lambda: self.membership.host.round, grace_s)
        checking = asyncio.ensure_future(keep_running("checking the idle workers", idle.run))
        following = asyncio.ensure_future(keep_running("following who is kept out", self._admission.follow))
        ends = (self.supervisor.all_over, self.supervisor.too_few, self._draining, self._interrupted)
        await _first_of(*(end.wait() for end in ends))
        checking.cancel()
        following.cancel()
        if self._draining.is_set() or self.supervisor.too_few.is_set():
            await self._drain()
        if self._stop_signal is not None:
            await self.supervisor.stop(KILL_GRACE_S)
            await self._leave_in_order(KILL_GRACE_S)  # who stops it does not wait for a long step of the others
            return self._stopped()
        await self._leave_in_order(self._options.url.timeout_s)
        return await self._outcome()

    async def _outcome(self) -> Outcome:
        """How the run has ended for this host, whose workers have."""
        assert self.supervisor is not None
        if all(worker.computes_wrong for worker in self.supervisor.workers):
            await _within(LEAVE_TIMEOUT_S, self._wrong.until_written())
            return self._computes_wrong()
        failed = self._failures.after_end(self.membership.host.round)
        if failed is not None:
            return Outcome(1, failed.text(), detail=failed.to_plain())
        codes = {worker.exit_code for worker in self.supervisor.workers if not worker.came_late}
        is_given_up = self.supervisor.too_few.is_set() and not self.membership.host.round.is_over
        # a script of torchrun's has finished when all of it have, and not with the first of them
        is_over = self.membership.host.round.is_over and not any(
            worker.has_stand_in and worker.gave_up for worker in self.supervisor.workers
        )
        if is_over or (codes <= {0} and not is_given_up):
            return Outcome(0, _finished_text(self.supervisor))
        if codes <= {0, STOPPED_EARLY} and not is_given_up:
            return Outcome(STOPPED_EARLY, "stopped before a deadline, not finished: start it again, and it goes on")
        report = await self._failures.last_words()
        return Outcome(1) if report is None else Outcome(1, report.text(), detail=report.to_plain())

    def _computes_wrong(self) -> Outcome:
        """Every worker of this host was found to: nothing of the run is to be started here any more."""
        assert self.supervisor is not None
        found = "\n".join(dict.fromkeys(worker.computes_wrong for worker in self.supervisor.workers))
        return Outcome(
            COMPUTES_WRONG,
            f"this host computes wrong, and takes no further part in the run: {found}\n"
            "do not start the run here again: have the host examined (torchelastic doctor --burn-in 600)",
        )

    async def _drain(self) -> None:
        """All workers of this host leave the run; returns when they have ended, or `term_grace_s` later."""
        assert self.supervisor is not None
        self.connections.leave_all()
        self.supervisor.stop_starting()
        patience = asyncio.sleep(self._options.term_grace_s)
        await _first_of(self.supervisor.all_over.wait(), self._interrupted.wait(), patience)
        if not self.supervisor.all_over.is_set() and not self._interrupted.is_set():
            log.warning("the workers did not leave within %g s: they are ended", self._options.term_grace_s)
        await self.supervisor.stop(KILL_GRACE_S)

    async def _leave_in_order(self, at_most_s: float) -> None:
        """What this host has said must reach the store; if its workers finished, see the run closed, within a time."""
        host = self.membership.host
        has_finished = any(member.done for member in host.members)
        if not host.in_reach and (self._stop_signal is not None or not has_finished):
            return
        if not has_finished:
            await _within(2.0, self.membership.until_written())
            return
        # the others may be in a long step: they see the end when it is over; and etcd may be away for good
        longest = asyncio.sleep(at_most_s)
        await _first_of(self.membership.until_closed(), self._interrupted.wait(), longest)


def _finished_text(supervisor: Supervisor) -> str:
    """What is said at the end of a run that has not failed; empty: nothing."""
    ended = ", ".join(str(worker.local_rank) for worker in supervisor.workers if worker.was_idle)
    if ended:
        return f"the run is finished; worker {ended} was not needed and was ended"
    if supervisor.nobody_asked:
        return "no worker has asked for a group, as torchelastic.train does: each has run the script by itself"
    return ""


async def _first_of(*works: Any) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is not None:
            log.error("this is a bug in torchelastic: the agent ends for this error", exc_info=task.exception())


async def _within(seconds: float, work: Any) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        log.info("aborted: not done within %g s", seconds)
