"""What the journals do not cover, as sentences for the page. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from torchelastic.observe.ledger.ledger_events import Join
from torchelastic.observe.report.model import AttemptRow
from torchelastic.observe.report.part import Part, RunEvent
from torchelastic.text import shortlist

#: What has happened so shortly before the end of the journals may not be written down by every agent yet.
_NOT_WRITTEN_YET_NS = 10_000_000_000


def gaps_of(
    parts: Sequence[Part], lives: Sequence[AttemptRow], events: Iterable[RunEvent], until_ns: int, began_ns: int
) -> Iterator[str]:
    """What is missing.

    Args:
        parts: of the run.
        lives: all that are known.
        events: all events.
        until_ns: how long the journals last, since the run began.
        began_ns: when that was, in nanoseconds since 1970.
    """
    names = [row.name for row in lives if not row.is_ended]
    if names:
        hosts = sorted({row.host for row in lives if not row.is_ended})
        ends_ns = {part.host: part.until_ns for part in parts if part.host in hosts}
        until = clock(began_ns + min(ends_ns.values()))
        if max(ends_ns.values()) - min(ends_ns.values()) > _NOT_WRITTEN_YET_NS:
            until += f" on {min(ends_ns, key=lambda host: ends_ns[host])}, and later on others"
        agents = "agent was" if len(hosts) == 1 else "agents were"
        verb = "is" if len(names) == 1 else "are"
        yield (
            f"{shortlist(names, 4)} {verb} without an end: the run goes on, or the {agents} lost "
            f"({shortlist(hosts, 4)}). What is known ends at {until}."
        )
    for part in parts:
        wrong = part.book.why_wrong(part.now_ns)
        if wrong:
            yield f"The accounts of {part.host} do not sum up, which should never be: {wrong}."
    missing = _missing(parts, events, until_ns, is_over=all(row.is_ended for row in lives))
    if missing:
        round_, there, wanted = missing
        yield (
            f"Round {round_} had {wanted} workers, and the journals know of {there}: those of other hosts are missing. "
            f"All sums and figures are of the workers that are listed here."
        )


def clock(at_ns: int) -> str:
    """The time of the day, for people anywhere.

    >>> clock(0)
    '1970-01-01 00:00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ns // 1_000_000_000))


def _missing(
    parts: Sequence[Part], events: Iterable[RunEvent], until_ns: int, *, is_over: bool
) -> tuple[int, int, int] | None:
    """The round that most workers are missing of: its number, how many are known, and how many it had."""
    complete_ns = max((_complete_from(part) for part in parts), default=0)
    last_ns = until_ns if is_over else until_ns - _NOT_WRITTEN_YET_NS
    joined: dict[tuple[int, int], set[str]] = {}
    for one in events:
        if isinstance(one.event, Join) and complete_ns <= one.at_ns <= last_ns:
            joined.setdefault((one.event.round, one.event.world_size), set()).add(one.event.worker)
    known = [(wanted - len(who), -round_, len(who), wanted) for (round_, wanted), who in joined.items()]
    lacking, negative_round, there, wanted = max(known, default=(0, 0, 0, 0))
    return (-negative_round, there, wanted) if lacking > 0 else None


def _complete_from(part: Part) -> int:
    """From here on every event of a journal is there; a round that began before may lack some."""
    if part.journal.before.counts.first_ns is None or not part.journal.events:
        return 0
    return part.since_began(min(event.at_ns for event in part.journal.events)) + _NOT_WRITTEN_YET_NS
