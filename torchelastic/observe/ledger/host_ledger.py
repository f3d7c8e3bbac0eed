"""The ledger of one host: every second of every worker is in exactly one account, whatever is learned later. Pure.

A value that takes events in the order in which they become known; they may have happened earlier. The ledger of a
live agent and the one that is read from its journal are the same, because both are made by `HostLedger.after`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from torchelastic.foreign_json import RecordError, converted
from torchelastic.observe.ledger.accounts import NOTHING, Account, Amounts, added
from torchelastic.observe.ledger.ledger_events import (
    ComputesWrong,
    Counted,
    Drain,
    End,
    Failure,
    LedgerEvent,
    LedgerFormatError,
    Restore,
    Save,
    Skipped,
    Start,
    StoreOutage,
    Straggler,
)
from torchelastic.observe.ledger.worker_lifetime import WorkerLifetime

#: So many workers that have ended are kept one by one; older ones are added up.
MOST_ENDED = 64
#: So many failures and deaths are kept to be matched with each other.
_RECENT = 128


@dataclass(frozen=True)
class Earlier:
    """Workers that ended long ago, added up."""

    lives: int = 0
    wall_ns: int = 0
    amounts: Amounts = NOTHING
    committed: int = 0
    undone: int = 0


@dataclass(frozen=True)
class Counts:
    """How often what has happened on this host.

    Attributes:
        started: worker processes.
        lost: those that ended as losses.
        failures: groups that broke, each counted once however many workers of the host noticed it or were lost in it;
            and workers lost before they were in a group.
        last_failed_round: the newest of those groups.
        restores_from_peer, restores_from_checkpoint: in the same way.
        last_restored_round: the newest in which a worker received its state.
        saves: as seen by each worker.
        skipped_steps, skipped_samples: left out on purpose, each step once.
        last_skipped_step: the newest of those.
        drains, stragglers, outages: events.
        wrong: workers that were found to compute wrong.
        away_ns: sum of the outages that are over.
        first_ns, last_ns: the first and the last that is known of the host.
    """

    started: int = 0
    lost: int = 0
    failures: int = 0
    last_failed_round: int = -1
    restores_from_peer: int = 0
    restores_from_checkpoint: int = 0
    last_restored_round: int = -1
    saves: int = 0
    drains: int = 0
    stragglers: int = 0
    wrong: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    last_skipped_step: int = -1
    outages: int = 0
    away_ns: int = 0
    first_ns: int | None = None
    last_ns: int = 0


@dataclass(frozen=True)
class Noticed:
    """A failure that a worker has noticed, kept until the death that was its cause is known.

    Attributes:
        detect_ns: what of its replayed time is put down as time to detect.
    """

    failure: Failure
    level_ns: int
    detect_ns: int = 0

    def detects(self, deaths: Iterable[tuple[int, str]]) -> int:
        """How long the first death of somebody else in this round was not noticed."""
        others = [
            at_ns
            for at_ns, worker in deaths
            if worker != self.failure.worker and self.level_ns < at_ns <= self.failure.at_ns
        ]
        if not others:
            return 0
        return min(self.failure.at_ns - max(min(others), self.failure.began_ns), self.failure.replayed_ns)


@dataclass(frozen=True)
class HostLedger:
    """See the module's docstring.

    Attributes:
        lives: by worker, in the order in which they began.
        earlier: what is not in `lives` any more.
        counts: see there.
        deaths: the newest: (when, who).
        noticed: the newest failures.
    """

    lives: dict[str, WorkerLifetime] = field(default_factory=dict)
    earlier: Earlier = Earlier()
    counts: Counts = Counts()
    deaths: tuple[tuple[int, str], ...] = ()
    noticed: tuple[Noticed, ...] = ()

    def after(self, event: LedgerEvent) -> HostLedger:
        """The ledger once this is known. Events of unknown workers begin a lifetime at their time."""
        ledger = self._seen(event)
        lifetime = ledger.lives.get(event.worker)
        match event:
            case Start() if lifetime is not None:
                return ledger._with(lifetime.began(event.at_ns))
            case Counted() if lifetime is not None:
                return ledger._with(lifetime.counted(event))
            case End() if lifetime is not None:
                return ledger._ended(lifetime, event)
            case Failure() if lifetime is not None:
                noticed = (*ledger.noticed, Noticed(event, lifetime.level_ns))[-_RECENT:]
                return replace(ledger._failed(event.round), noticed=noticed)._matched(newest=1)
            case Restore() if lifetime is not None:
                return ledger._restored(lifetime, event)
            case Save():
                saved = ledger if lifetime is None else ledger._with(lifetime.saved(event))
                return saved._plus(saves=1)
            case Drain():
                return ledger._plus(drains=1)
            case Skipped() if event.step > ledger.counts.last_skipped_step:  # every worker of the host says so
                counts = replace(ledger.counts, last_skipped_step=event.step)
                return replace(ledger, counts=counts)._plus(skipped_steps=1, skipped_samples=event.samples)
            case ComputesWrong():
                return ledger._plus(wrong=1)
            case Straggler():
                return ledger._plus(stragglers=1)
            case StoreOutage():
                return ledger._plus(away_ns=event.away_ns) if event.is_over else ledger._plus(outages=1)
        return ledger  # what remains is for readers of the journal

    def after_all(self, events: Iterable[LedgerEvent]) -> HostLedger:
        """The ledger once all of these are known."""
        ledger = self
        for event in events:
            ledger = ledger.after(event)
        return ledger

    def went_back_to(self, step: int, at_ns: int) -> HostLedger:
        """The group resumed at a step, at this time: what workers that had ended by then did beyond it is lost.

        A negative step is not known: nothing is.
        """
        ledger = self
        for life in self.lives.values():
            if life.ended_ns is not None and life.ended_ns <= at_ns and 0 <= step < life.marks.last_step:
                ledger = ledger._with(life.goes_back_to(step))
        return ledger

    def amounts(self, now_ns: int) -> Amounts:
        """All workers' time by account up to now; sums to `worker_ns` exactly."""
        total = self.earlier.amounts
        for life in self.lives.values():
            total = added(total, life.amounts(now_ns))
        return total

    def worker_ns(self, now_ns: int) -> int:
        """The wall time of all workers, added up."""
        return self.earlier.wall_ns + sum(life.wall_ns(now_ns) for life in self.lives.values())

    def committed(self) -> int:
        """Steps committed, each counted for every worker that took part in it."""
        return self.earlier.committed + sum(life.tally.committed for life in self.lives.values())

    def undone(self) -> int:
        """Attempts that were undone or lost, counted in the same way."""
        return self.earlier.undone + sum(life.tally.undone for life in self.lives.values())

    def why_wrong(self, now_ns: int) -> str:
        """The invariant, checked: the name of a worker whose accounts do not sum up; empty: all do."""
        for life in self.lives.values():
            amounts = life.amounts(now_ns)
            if min(amounts) < 0 or sum(amounts) != life.wall_ns(now_ns):
                return f"{life.worker}: {sum(amounts)} ns in accounts, {life.wall_ns(now_ns)} ns on the wall"
        return "" if sum(self.earlier.amounts) == self.earlier.wall_ns else "the workers that ended earlier"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _seen(self, event: LedgerEvent) -> HostLedger:
        first_ns = event.at_ns if self.counts.first_ns is None else min(self.counts.first_ns, event.at_ns)
        counts = replace(self.counts, first_ns=first_ns, last_ns=max(self.counts.last_ns, event.at_ns))
        ledger = replace(self, counts=counts)
        needs_life = event.worker and isinstance(event, (Start, Counted, End, Restore, Failure))
        if not needs_life or event.worker in self.lives:
            return ledger
        began_ns = event.tally.started_ns if isinstance(event, Counted) else event.at_ns
        counts = replace(counts, started=counts.started + 1, first_ns=min(first_ns, began_ns))
        return replace(
            ledger, lives={**self.lives, event.worker: WorkerLifetime.begun(event.worker, began_ns)}, counts=counts
        )

    def _with(self, life: WorkerLifetime) -> HostLedger:
        return replace(self, lives={**self.lives, life.worker: life})

    def _plus(self, **numbers: int) -> HostLedger:
        return replace(
            self, counts=replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in numbers.items()})
        )

    def _failed(self, round_: int) -> HostLedger:
        """A group broke, or a worker was lost that was in none (-1); the same group breaks once."""
        if 0 <= round_ <= self.counts.last_failed_round:
            return self
        newest = max(round_, self.counts.last_failed_round)
        counts = replace(self.counts, failures=self.counts.failures + 1, last_failed_round=newest)
        return replace(self, counts=counts)

    def _ended(self, lifetime: WorkerLifetime, event: End) -> HostLedger:
        if lifetime.ended_ns is not None:
            return self
        ended = lifetime.ends(event)
        ledger = self._with(ended)
        if event.is_loss:
            lost = ledger._plus(lost=1)._failed(ended.tally.round)
            ledger = lost.died(ended.ended_ns or event.at_ns, event.worker)
        return ledger._thinned()

    def _restored(self, lifetime: WorkerLifetime, event: Restore) -> HostLedger:
        # workers that were gone by then cannot report it: what they had done beyond this step did not last
        ledger = self._with(lifetime.restored(event)).went_back_to(event.step, event.at_ns)
        if event.round <= ledger.counts.last_restored_round or not event.source:
            return ledger
        name = "restores_from_checkpoint" if event.source == "checkpoint" else "restores_from_peer"
        return replace(ledger, counts=replace(ledger.counts, last_restored_round=event.round))._plus(**{name: 1})

    def died(self, at_ns: int, worker: str) -> HostLedger:
        """The ledger once a worker of this host, or a member of another one, was lost at this time."""
        ledger = replace(self, deaths=(*self.deaths, (at_ns, worker))[-_RECENT:])
        return ledger._matched()

    def _matched(self, newest: int = _RECENT) -> HostLedger:
        """Once more for the newest failures: deaths become known before or after they are noticed."""
        ledger, noticed = self, list(self.noticed[:-newest])
        for one in self.noticed[-newest:]:
            detect_ns = max(one.detect_ns, one.detects(self.deaths))
            life = ledger.lives.get(one.failure.worker)
            if life is not None and detect_ns != one.detect_ns:
                ledger = ledger._with(replace(life, detected_ns=life.detected_ns + detect_ns - one.detect_ns))
            noticed.append(replace(one, detect_ns=detect_ns))
        return replace(ledger, noticed=tuple(noticed))

    def _thinned(self) -> HostLedger:
        ended = [life for life in self.lives.values() if life.ended_ns is not None]
        ledger = self
        for life in ended[: max(0, len(ended) - MOST_ENDED)]:
            earlier, at_ns = ledger.earlier, life.ended_ns or 0
            earlier = Earlier(
                earlier.lives + 1,
                earlier.wall_ns + life.wall_ns(at_ns),
                added(earlier.amounts, life.amounts(at_ns)),
                earlier.committed + life.tally.committed,
                earlier.undone + life.tally.undone,
            )
            ledger = replace(
                ledger, earlier=earlier, lives={name: one for name, one in ledger.lives.items() if name != life.worker}
            )
        return ledger


def share(amounts: Amounts, account: Account) -> float:
    """The part of an account in the sum; 0 where nothing has been counted."""
    total = sum(amounts)
    return amounts[account] / total if total else 0.0


# --- as JSON: what the head of a journal file brings forward from the files before it ---------------------------------


def ledger_to_dict(ledger: HostLedger) -> dict[str, Any]:
    """For JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(ledger)
    return plain


def ledger_from_dict(fields: object) -> HostLedger:
    """What `ledger_to_dict` made.

    Raises:
        LedgerFormatError: it is something else, or its accounts do not sum up.
    """
    try:
        ledger = converted("a book", fields, HostLedger, needed=list(ledger_to_dict(HostLedger())))
    except RecordError as error:
        raise LedgerFormatError(str(error)) from error
    wrong = ledger.why_wrong(ledger.counts.last_ns)
    if wrong:
        raise LedgerFormatError(f"a book that does not sum up: {wrong}")
    return ledger
