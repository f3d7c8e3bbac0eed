"""A launcher's agent: runs the workers of this host, and what is served and said of them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchelastic.agent.agent import Agent, AgentOptions, Outcome
from torchelastic.agent.dashboard import dashboard
from torchelastic.agent.failure_reporter import FailureReporter, read_members
from torchelastic.agent.health_check import Admission, HealthCheck
from torchelastic.agent.host_events import Event, Publish, RoundChanged, WorkerExited
from torchelastic.agent.idle_workers import IdleWorkers
from torchelastic.agent.ledger_recorder import LedgerRecorder
from torchelastic.agent.membership import LEAVE_TIMEOUT_S
from torchelastic.agent.metrics_endpoint import MetricsEndpoint
from torchelastic.agent.plain_group import host_by_host
from torchelastic.agent.shown_progress import ShownProgress
from torchelastic.agent.signals import forward
from torchelastic.agent.status_publisher import StatusPublisher
from torchelastic.agent.supervisor import KILL_GRACE_S, Supervisor
from torchelastic.agent.tasks import first_of, keep_running, within
from torchelastic.agent.wrong_places import WrongPlaces
from torchelastic.log_lines import HUMAN, JSON
from torchelastic.network.interfaces import is_loopback
from torchelastic.observe.page.listening import PageOptions
from torchelastic.observe.page.page_server import PageServer
from torchelastic.processes.exit_codes import COMPUTES_WRONG, STOPPED_EARLY
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import Round, RoundState
from torchelastic.rendezvous.store import CoordinationStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LauncherOptions(AgentOptions):
    """What a launcher's agent is started with, besides.

    Attributes:
        metrics_address: (host, port) to serve Prometheus metrics at; port 0 takes any free one; None: not served.
        push_gateway: URL of a Prometheus push gateway to push them to; None: not pushed.
        ledger_dir: where the ledger of this host is written, see docs/ledger.md; None: it is kept in memory only.
        page: the live page, see docs/observing.md; None: not served.
        log_form: "human" or "json": of the log of this agent and of its workers.
        health_check: decides whether this host may take part; None: nothing does.
    """

    metrics_address: tuple[str, int] | None = None
    push_gateway: str | None = None
    ledger_dir: Path | None = None
    page: PageOptions | None = None
    log_form: str = HUMAN
    health_check: HealthCheck | None = None


class LauncherAgent(Agent):
    """See `Agent`.

    Args:
        options: see `LauncherOptions`.
        store: a connection to the run's etcd, owned by the agent from now on.
        make_supervisor: builds the supervisor of this host's workers from (run_is_over, publish).
    """

    def __init__(
        self,
        options: LauncherOptions,
        store: CoordinationStore,
        make_supervisor: Callable[[Callable[[], bool], Publish], Supervisor],
    ) -> None:
        super().__init__(options, store)
        self._options, self._make_supervisor = options, make_supervisor
        self._page: PageServer | None = None

    # --- assembling -------------------------------------------------------------------------------

    def _build(self) -> None:
        options, store, keys, host = self._options, self._store, self._keys, self._host
        publish = self._events.publish
        self._admission = Admission(store, keys, host, options.health_check)
        super()._build()
        self.supervisor = self._make_supervisor(lambda: self.membership.host.round.is_over, publish)
        self._metrics = MetricsEndpoint(options.url.run_id, host)
        self._failures = FailureReporter(self._incarnation, lambda: read_members(store, keys))
        self._wrong = WrongPlaces(store, keys, host)
        self._recorder = self._make_recorder(publish)
        self._metrics.add_ledger(self._recorder.latest)
        self._status = StatusPublisher(
            store, keys, host=host, incarnation=self._incarnation, membership=self.membership, recorder=self._recorder
        )
        self._shown = ShownProgress(self._status.status, self.supervisor.terminal, self._wait_limit.waits_for_store)
        for part in (self._status, self._metrics, self._recorder, self._failures, self.supervisor, self._wrong, self):
            self._events.subscribe(part.on_event)
        if options.page is not None:
            self._status.address = options.page.url
            self._page = dashboard(options.page, store, options.url, host, self._status.with_all_events)

    def _make_recorder(self, publish: Publish) -> LedgerRecorder:
        return LedgerRecorder(
            self._options.socket_path,
            run_id=self._options.url.run_id,
            host=self._host,
            incarnation=self._incarnation,
            folder=self._options.ledger_dir,
            configured_workers=self._options.url.max_workers,
            workers=lambda: self.supervisor.workers,
            sees_store=lambda: self.membership.host.in_reach,
            logs_each=self._options.log_form == JSON,
            publish=publish,
        )

    def _kept_out(self) -> str:
        return self._admission.others_text()

    # --- its beginning and its end ----------------------------------------------------------------

    def _listen(self) -> None:
        self._metrics.listen(self._options.metrics_address)

    def _early_end(self) -> Outcome | None:
        return self._came_late() if self.membership.host.round.is_over else None

    def _begin(self) -> None:
        self._look_at_address()
        self._metrics.push(self._options.push_gateway)
        self._status.start()
        self._shown.start()
        if self._page is not None:
            self._page.start()

    def _look_at_address(self) -> None:
        """Warn of one that no other host reaches, where others are expected."""
        address = self.connections.address
        others = self._options.url.max_workers > len(self.supervisor.workers)
        if others and is_loopback(address):
            log.warning(
                "this host tells the others to reach it at %s, which no other host can: name etcd by an address that "
                "they reach too, or choose a network with --iface",
                address,
            )

    async def _stop(self) -> None:
        if self._page is not None:  # whoever looks is told, within a bound
            await asyncio.get_running_loop().run_in_executor(None, self._page.stop)
        self._status.stop()
        self._shown.stop(self._status.view.furthest(self._recorder.keeper.now()))
        await super()._stop()
        await self.supervisor.let_go()
        await self._recorder.stop()
        self._failures.close()
        self._admission.close()
        await self._metrics.stop()

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
        for member_id in round_.evicted:
            pid = self.connections.evict(member_id)
            if pid is not None:
                self.supervisor.end_hung(pid)
        if round_.hopeless and any(self.connections.is_own(name) for name in round_.roster):
            log.error("%s: the run ends", round_.because)
            self.supervisor.too_few.set()

    def _show_ranks(self, roster: Sequence[str]) -> None:
        """The lines of this host's workers may begin with their ranks."""
        if any(worker.has_stand_in for worker in self.supervisor.workers):
            roster = host_by_host(roster)
        own = {MemberId.of(name).place: rank for rank, name in enumerate(roster) if self.connections.is_own(name)}
        self.supervisor.terminal.prefix.learn({int(place): rank for place, rank in own.items() if place.isdecimal()})

    def _on_notice(self, number: signal.Signals) -> None:
        forward(number, [pid for pid in (worker.speaker for worker in self.supervisor.workers) if pid is not None])

    def _came_late(self) -> Outcome:
        url = self._options.url
        closed = f"run {url.run_id!r} at {url.endpoints_text} is already closed: it was finished before"
        return Outcome(1, f"{closed}; choose another run id (--rdzv-id)", came_late=True)

    async def _serve(self) -> Outcome:
        """Run this host's workers to the end of the run, or of their strength."""
        self.supervisor.skip(await self._wrong.read())
        if all(worker.computes_wrong for worker in self.supervisor.workers):
            return self._computes_wrong()
        await first_of(self._admission.decide(), self._draining.wait(), self._interrupted.wait())
        if self._stop_signal is not None:
            return self._stopped()
        if self._admission.failure is not None:
            return Outcome(self._admission.failure.exit_code, self._admission.failure.text())
        if self.membership.host.round.is_over:  # while the check ran
            return self._came_late()
        self.supervisor.start()
        self._recorder.start()
        grace_s = self._options.term_grace_s
        idle = IdleWorkers(self.supervisor, self.connections.members, lambda: self.membership.host.round, grace_s)
        checking = asyncio.ensure_future(keep_running("checking the idle workers", idle.run))
        following = asyncio.ensure_future(keep_running("following who is kept out", self._admission.follow))
        ends = (self.supervisor.all_over, self.supervisor.too_few, self._draining, self._interrupted)
        await first_of(*(end.wait() for end in ends))
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
        if all(worker.computes_wrong for worker in self.supervisor.workers):
            await within(LEAVE_TIMEOUT_S, self._wrong.until_written())
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
        found = "\n".join(dict.fromkeys(worker.computes_wrong for worker in self.supervisor.workers))
        return Outcome(
            COMPUTES_WRONG,
            f"this host computes wrong, and takes no further part in the run: {found}\n"
            "do not start the run here again: have the host examined (torchelastic doctor --burn-in 600)",
        )

    async def _drain(self) -> None:
        """All workers of this host leave the run; returns when they have ended, or `term_grace_s` later."""
        self.connections.leave_all()
        self.supervisor.stop_starting()
        patience = asyncio.sleep(self._options.term_grace_s)
        await first_of(self.supervisor.all_over.wait(), self._interrupted.wait(), patience)
        if not self.supervisor.all_over.is_set() and not self._interrupted.is_set():
            log.warning("the workers did not leave within %g s: they are ended", self._options.term_grace_s)
        await self.supervisor.stop(KILL_GRACE_S)


def _finished_text(supervisor: Supervisor) -> str:
    """What is said at the end of a run that has not failed; empty: nothing."""
    ended = ", ".join(str(worker.local_rank) for worker in supervisor.workers if worker.was_idle)
    if ended:
        return f"the run is finished; worker {ended} was not needed and was ended"
    if supervisor.nobody_asked:
        return "no worker has asked for a group, as torchelastic.train does: each has run the script by itself"
    return ""
