"""On what a worker spent its time, along the time line, as it was counted then; what was learned later is in the sums.

The ledger has the exact sums; this is for a drawing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchelastic.observe.ledger.accounts import NOTHING, Account, Amounts, plus
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import Counted
from torchelastic.observe.ledger.worker_lifetime import WorkerLifetime

#: How much had been counted by when, by account.
_Point = tuple[int, Sequence[float]]


@dataclass(frozen=True)
class Segment:
    """Some time of a life.

    Attributes:
        from_ns, to_ns: when.
        amounts: by account; they sum to its length, but for some nanoseconds.
    """

    from_ns: int
    to_ns: int
    amounts: Amounts


def segments_of(
    journal: Journal, final: HostLedger, now_ns: int, edges: Sequence[int]
) -> dict[str, tuple[Segment, ...]]:
    """The lives of a journal from their start to their end, or to now, in order and without gaps, by worker.

    Args:
        journal: as it was found.
        final: its book in the end, with what other journals know of it.
        now_ns: by the clock of the journal.
        edges: where a segment ends and the next one begins, by the same clock and in order.
    """
    tallies: dict[str, list[Counters]] = defaultdict(list)
    for life in journal.before.lives.values():
        tallies[life.worker].append(life.tally)
    for event in journal.events:
        if isinstance(event, Counted):
            tallies[event.worker].append(event.tally)
    return {
        life.worker: _cut(_points(life, tallies[life.worker], life.until_ns(now_ns)), edges)
        for life in final.lives.values()
    }


def _points(life: WorkerLifetime, tallies: Iterable[Counters], until_ns: int) -> list[_Point]:
    """What had been counted at its start, at each count and at its end; it only grows, as fast as time passes."""
    before_ns = life.tally.started_ns - life.started_ns
    counts = [(life.started_ns, NOTHING), (life.tally.started_ns, plus(NOTHING, Account.START_UP, before_ns))]
    for tally in tallies:
        if tally.started_ns == life.tally.started_ns and counts[-1][0] < tally.since_ns < until_ns:
            counts.append((tally.since_ns, plus(tally.amounts(tally.since_ns), Account.START_UP, before_ns)))
    counts.append((until_ns, plus(life.tally.amounts(until_ns), Account.START_UP, before_ns)))
    points: list[_Point] = [counts[0]]
    for (begin_ns, earlier), (end_ns, later) in pairwise(counts):
        # a step that was undone had been counted as productive while it was under way
        grown = [max(0, new - old) for new, old in zip(later, earlier, strict=True)]
        scale = (end_ns - begin_ns) / (sum(grown) or 1)
        points.append((end_ns, [ns + more * scale for ns, more in zip(points[-1][1], grown, strict=True)]))
    return points


def _cut(points: Sequence[_Point], edges: Sequence[int]) -> tuple[Segment, ...]:
    """The time between the first point and the last one, in parts: what was counted between two points, evenly."""
    began_ns, ended_ns = points[0][0], points[-1][0]
    bounds = [began_ns, *(edge for edge in edges if began_ns < edge < ended_ns), ended_ns]
    sums = [_counted_at(points, at_ns) for at_ns in bounds]
    return tuple(
        Segment(from_ns, to_ns, tuple(new - old for new, old in zip(later, earlier, strict=True)))
        for (from_ns, earlier), (to_ns, later) in pairwise(zip(bounds, sums, strict=True))
        if to_ns > from_ns
    )


def _counted_at(points: Sequence[_Point], at_ns: int) -> list[int]:
    place = min(bisect_right(points, at_ns, key=lambda point: point[0]), len(points) - 1)
    (begin_ns, earlier), (end_ns, later) = points[place - 1], points[place]
    part = (at_ns - begin_ns) / (end_ns - begin_ns) if end_ns > begin_ns else 1.0
    return [round(old + (new - old) * part) for old, new in zip(earlier, later, strict=True)]
