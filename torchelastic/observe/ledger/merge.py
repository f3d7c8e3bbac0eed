"""Merges the ledgers of a run's hosts: what one host knows may change the accounts of another one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import End, Restore

#: A live host has written its own part of a restore, by then.
SILENT_NS = 5_000_000_000


def merged_ledgers(journals: Mapping[str, Journal]) -> dict[str, HostLedger]:
    """The ledger at the end of each journal, with what the other journals know of it.

    When a worker of another host died is when a failure began, so the time until it was noticed here is time to detect;
    and what a lost host had done beyond the step that the others went back to is lost. Clocks of hosts are tied
    by the time of the day, so times of different hosts are as good as their synchronisation.

    A journal that ends before its workers did is that of a live agent, or of one that was lost with them: where another
    host went back to a step later than its last line, and by more than it takes to write one, it is taken as lost then.
    """
    alone = {name: journal.book() for name, journal in journals.items()}
    return {
        name: _with_others(
            alone[name], journal, [(other, alone[key]) for key, other in journals.items() if key != name]
        )
        for name, journal in journals.items()
    }


def _with_others(ledger: HostLedger, journal: Journal, others: list[tuple[Journal, HostLedger]]) -> HostLedger:
    horizon_ns = max((_here(journal, other, last.counts.last_ns) for other, last in others), default=0)
    first_ns = ledger.counts.first_ns
    for at_ns, event in sorted(_losses_and_restores(journal, first_ns, others), key=lambda found: found[0]):
        if isinstance(event, End):
            ledger = ledger.died(at_ns, event.worker)
            continue
        if at_ns > ledger.counts.last_ns and horizon_ns - at_ns > SILENT_NS:
            ledger = _ended(ledger, ledger.counts.last_ns)
        ledger = ledger.went_back_to(event.step, at_ns)
    return ledger


def _losses_and_restores(
    journal: Journal, first_ns: int | None, others: list[tuple[Journal, HostLedger]]
) -> Iterator[tuple[int, End | Restore]]:
    """Losses and restores of others, at their time by the clock of this journal, within what it is about."""
    for other, _ in others:
        for event in other.events:
            at_ns = _here(journal, other, event.at_ns)
            is_relevant = (isinstance(event, End) and event.is_loss) or (isinstance(event, Restore) and event.step >= 0)
            if is_relevant and first_ns is not None and at_ns >= first_ns:
                assert isinstance(event, (End, Restore))
                yield at_ns, event


def _here(journal: Journal, other: Journal, at_ns: int) -> int:
    """A time of another journal by the clock of this one."""
    return other.head.wall_ns_of(at_ns) - journal.head.wall_ns + journal.head.monotonic_ns


def _ended(ledger: HostLedger, at_ns: int) -> HostLedger:
    living = [name for name, life in ledger.lives.items() if life.ended_ns is None]
    return ledger.after_all(End(at_ns=at_ns, worker=name, cause="its agent was lost") for name in living)
