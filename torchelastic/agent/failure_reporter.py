"""The agent gathers what fails, and reports it once it is known, first cause first; see `torchelastic.agent.causes`.

What it knows of other hosts is what the round's document tells, and in the end who is still registered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from torchelastic.agent.causes import FailedWorker, FailureReport, LostElsewhere, Trouble, Undone, report_of
from torchelastic.agent.event_log import events_log
from torchelastic.agent.host_events import Event, LedgerSampled, LedgerWritten, RoundChanged, WorkerFailed
from torchelastic.log_lines import Position, fields
from torchelastic.observe.ledger.ledger_events import Failure
from torchelastic.rendezvous.leadership import read_members as members_among
from torchelastic.rendezvous.loss import LeaseExpired, Left, Loss, LossWitness, ProcessEnded
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import NO_ROUND, Keys, Member, Round, RoundState
from torchelastic.rendezvous.store import CoordinationStore, StoreError

log = logging.getLogger(__name__)

#: What goes with a failure is known so long after the next group has formed: the workers' pages are read once a second.
SETTLED_S = 2.0
#: Where no group comes, it is reported after so long.
PATIENCE_S = 10.0
#: The store is asked for the members so long at most, when the run is over for this host.
ASK_S = 2.0
#: So much trouble is kept at a time: the beginning, for the rest follows from it.
_MOST_TROUBLES = 1000


class FailureReporter:
    """Use it on the agent's event loop.

    Args:
        incarnation: of the agent: part of its members' ids.
        members: gives the members that are registered, on any thread; may raise StoreError.
        say: called with a report while the run goes on.
        wall_s: Unix seconds.
    """

    def __init__(
        self,
        incarnation: str,
        members: Callable[[], Iterable[Member]],
        *,
        say: Callable[[FailureReport], None] | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._incarnation, self._members = incarnation, members
        self._say, self._wall_s = say or log_report, wall_s
        self._joined = NO_ROUND
        self._witness = LossWitness()
        self._lost: dict[str, LostElsewhere] = {}
        self._troubles: list[Trouble] = []
        self._gave_up: list[FailedWorker] = []
        self._after_end: list[FailedWorker] = []
        self._first: FailedWorker | None = None
        self._opened_s = self._newest_s = self._joined_s = 0.0

    # --- what happens -------------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Gather what fails; every second or so, report what is known well enough by now."""
        match event:
            case RoundChanged(round_):
                self._round_changed(round_)
            case LedgerWritten(at_s, Failure() as failure):
                position = Position(failure.rank, failure.round, failure.step)
                self._add(Undone(at_s=at_s, position=position, error=failure.cause, is_undone=failure.is_undone))
            case WorkerFailed(failed):
                self._worker_failed(failed)
            case LedgerSampled():
                self._report_if_settled()

    def _round_changed(self, round_: Round) -> None:
        joined = self._joined
        self._witness.sees(round_)
        if joined.roster and not round_.is_over:
            for loss in self._witness.explains(joined, round_):
                self._add_loss(loss)
        if round_.state is RoundState.RUNNING and round_.number > joined.number:
            self._joined, self._lost = round_, {}
            self._witness.begins(round_)
            self._joined_s = self._wall_s()

    def found(self, members: Iterable[Member]) -> None:
        """Who is registered, now that the run is over for this host: who is not, or has ended, is lost."""
        here = {member.member_id: member for member in members}
        for name in self._joined.roster:
            if name in self._witness.leaving:
                continue
            if name not in here:
                self._add_loss(LeaseExpired(name))
            elif here[name].departed:
                self._add_loss(ProcessEnded(name))

    def _worker_failed(self, failed: FailedWorker) -> None:
        if failed.had_finished:
            self._after_end.append(failed)
        elif failed.gave_up:
            self._gave_up.append(failed)
        if failed.position.rank == 0:
            self._first = failed
        self._add(failed)

    # --- what is said -------------------------------------------------------------------------------------------------

    def _report_if_settled(self) -> None:
        if not self._troubles:
            return
        now_s = self._wall_s()
        goes_on = self._joined.number > max(trouble.position.round for trouble in self._troubles) >= 0
        is_settled = goes_on and now_s - max(self._joined_s, self._newest_s) >= SETTLED_S
        if is_settled or now_s - self._opened_s >= PATIENCE_S:
            self.close()

    def close(self) -> None:
        """Say what was not said yet."""
        report = report_of(self._troubles)
        self._troubles = []
        if report is not None:
            self._say(report)

    async def last_words(self) -> FailureReport | None:
        """Why the run is over for this host, its workers having failed; what was not said yet is in it."""
        loop = asyncio.get_running_loop()
        try:
            self.found(await asyncio.wait_for(loop.run_in_executor(None, self._members), ASK_S))
        except (StoreError, asyncio.TimeoutError) as error:
            log.info("who else is lost is not known: %s", str(error) or f"etcd has not answered within {ASK_S:g} s")
        troubles = dict.fromkeys([*self._gave_up, *self._lost.values(), *self._troubles])
        self._troubles = []
        return report_of(list(troubles), is_over=True)

    def after_end(self, last: Round) -> FailureReport | None:
        """What of this host failed after it had finished the run, or as rank 0 while the others finished.

        Args:
            last: the run's last round.

        Returns:
            None: nothing. What is in it is not said again.
        """
        failed, first = self._after_end, self._first
        said = [*failed]
        if first is not None and first not in failed and last.is_over and first.position.round == last.number:
            failed, said = [*failed, replace(first, was_first=True)], [*failed, first]
        self._troubles = [trouble for trouble in self._troubles if trouble not in said]
        return report_of(failed, is_over=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add_loss(self, loss: Loss) -> None:
        is_own = MemberId.of(loss.member).incarnation == self._incarnation
        if is_own or isinstance(loss, Left) or loss.member in self._lost:
            return
        self._lost[loss.member] = LostElsewhere(
            at_s=self._wall_s(),
            member=loss.member,
            how=loss.sentence,
            certainty=loss.certainty,
            position=Position(self._joined.roster.index(loss.member), self._joined.number),
        )
        self._add(self._lost[loss.member])

    def _add(self, trouble: Trouble) -> None:
        self._newest_s = self._wall_s()
        if not self._troubles:
            self._opened_s = self._newest_s
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(trouble)


def read_members(store: CoordinationStore, keys: Keys) -> list[Member]:
    """The members that are registered. Raises StoreError."""
    return members_among(store.list_prefix(keys.members).items)


def log_report(report: FailureReport) -> None:
    """As one record of the launcher's log."""
    events_log.warning("%s", report.text(), extra=fields(kind="failure_report", **report.to_plain()))
