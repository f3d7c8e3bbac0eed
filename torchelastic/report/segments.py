"""On what a worker spent its time, along the time line: what events say in its place, other counts in between.

The ledger has the exact sums; this is for a drawing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchelastic.ledger.accounts import NOTHING, Account, Amounts, added, plus
from torchelastic.ledger.counters import Counters
from torchelastic.ledger.events import Counted, End, Failure, Join, LostMember, Restore, Save
from torchelastic.ledger.host_ledger import HostLedger
from torchelastic.ledger.journal import Journal
from torchelastic.ledger.worker_lifetime import WorkerLifetime

#: These events may change what other workers' time was.
_ABOUT_OTHERS = (Failure, End, LostMember, Restore)
#: What a step that was counted as productive while it was under way may have been instead.
_LATER = (Account.REPLAYED, Account.DATA_WAIT, Account.SAVE_STALL)


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


@dataclass(frozen=True)
class _Span:
    """An event says that this time went to this account."""

    from_ns: int
    to_ns: int
    account: Account


@dataclass
class _History:
    """What a journal contains about one worker.

    Attributes:
        tallies: what it had counted, by time.
        spans: what it did.
        lost: since when how much of its productive time is known to be lost.
    """

    tallies: list[Counters] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)


def segments_of(journal: Journal, final: HostLedger, now_ns: int) -> dict[str, list[Segment]]:
    """The lives of a journal from their start to their end, or to now, in order and without gaps, by worker.

    Args:
        journal: as it was found.
        final: its book in the end, with what other journals know of it.
        now_ns: by the clock of the journal.
    """
    histories = _histories(journal, final)
    detected: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in final.noticed:
        detected[one.failure.worker].append((one.failure.at_ns, one.detect_ns))
    return {
        life.worker: _segments(life, histories[life.worker], detected[life.worker], life.until_ns(now_ns))
        for life in final.lives.values()
    }


def cells(parts: Iterable[Segment], edges: Sequence[int]) -> tuple[Segment, ...]:
    """The same, coarser: one segment between two edges, and neighbours of one and the same account together.

    Args:
        parts: in order, without gaps.
        edges: in order.
    """
    found: list[Segment] = []
    for part in _cut(parts, edges):
        last = found[-1] if found else None
        if last is None or not (_is_same_cell(last, part, edges) or _is_alike(last, part)):
            found.append(part)
        else:
            found[-1] = Segment(last.from_ns, part.to_ns, added(last.amounts, part.amounts))
    return tuple(found)


# --- what events say --------------------------------------------------------------------------------------------------


def _histories(journal: Journal, final: HostLedger) -> Mapping[str, _History]:
    histories: dict[str, _History] = defaultdict(_History)
    book = journal.before
    first_join_ns: dict[str, int] = {}
    forms_since_ns: dict[str, int] = {}
    for life in book.lives.values():
        histories[life.worker].tallies.append(life.tally)
    for event in journal.events:
        before, book = book, book.after(event)
        of_it = histories[event.worker]
        if isinstance(event, Counted) and event.worker in book.lives:
            of_it.tallies.append(book.lives[event.worker].tally)
        elif isinstance(event, Join) and event.is_first:
            first_join_ns[event.worker] = event.at_ns
        elif isinstance(event, Join):  # after an agreed stop nothing says when it began: as much as was counted
            of_it.spans.append(_Span(forms_since_ns.pop(event.worker, 0), event.at_ns, Account.RE_FORM))
        elif isinstance(event, Failure):
            of_it.spans.append(_Span(event.at_ns - event.replayed_ns, event.at_ns, Account.REPLAYED))
            forms_since_ns[event.worker] = event.at_ns
        elif isinstance(event, Restore):
            of_it.spans.append(_Span(event.at_ns - event.took_ns, event.at_ns, Account.RESTORE))
        elif isinstance(event, Save):
            of_it.spans.append(_Span(event.at_ns - event.stall_ns, event.at_ns, Account.SAVE_STALL))
        if isinstance(event, _ABOUT_OTHERS):
            for life in book.lives.values():
                known = before.lives.get(life.worker)
                if known is not None and life.lost_ns > known.lost_ns:
                    histories[life.worker].lost.append((event.at_ns, life.lost_ns - known.lost_ns))
    for life in final.lives.values():
        ready_ns = life.tally.started_ns + life.tally.totals[Account.START_UP]
        spans = histories[life.worker].spans
        spans.append(_Span(life.started_ns, ready_ns, Account.START_UP))
        spans.append(_Span(ready_ns, first_join_ns.get(life.worker, ready_ns), Account.IDLE))
        spans.sort(key=lambda span: span.to_ns)
    return histories


# --- one life ---------------------------------------------------------------------------------------------------------


def _segments(
    life: WorkerLifetime, history: _History, detected: Iterable[tuple[int, int]], until_ns: int
) -> list[Segment]:
    segments: list[Segment] = []
    for (begin_ns, earlier), (end_ns, later) in pairwise(_points(life, history.tallies, until_ns)):
        counted = [max(0, new - old) for new, old in zip(later, earlier, strict=True)]
        too_much_ns = sum(counted) - (end_ns - begin_ns)
        for account in _LATER:
            taken_ns = min(too_much_ns, counted[account])
            counted[account] -= taken_ns
            too_much_ns -= taken_ns
        segments += _placed(begin_ns, end_ns, counted, history.spans)
    # the rest is known from other journals, or by files that are gone
    for at_ns, ns in (*history.lost, (until_ns, life.lost_ns - sum(ns for _, ns in history.lost))):
        _turn(segments, at_ns, ns, Account.PRODUCTIVE, Account.REPLAYED)
    for at_ns, ns in detected:
        _turn(segments, at_ns, ns, Account.REPLAYED, Account.DETECT)
    return segments


def _placed(begin_ns: int, end_ns: int, counted: list[int], spans: Sequence[_Span]) -> Iterator[Segment]:
    """An interval with what events say of it in its place, and the rest of what was counted evenly in between."""
    left, known, at_ns = list(counted), [], begin_ns
    for span in spans[bisect_left(spans, begin_ns, key=lambda span: span.to_ns) :]:
        if span.from_ns >= end_ns:
            break
        to_ns = min(span.to_ns, end_ns)
        most_ns = left[span.account]
        if span.account is Account.REPLAYED:
            most_ns += left[Account.PRODUCTIVE]  # as which the step was counted while it was under way
        from_ns = max(span.from_ns, at_ns, to_ns - most_ns)  # where less was counted: the last part of it
        if to_ns > from_ns:
            own_ns = min(left[span.account], to_ns - from_ns)
            left[span.account] -= own_ns
            left[Account.PRODUCTIVE] -= to_ns - from_ns - own_ns
            known.append(Segment(from_ns, to_ns, plus(NOTHING, span.account, to_ns - from_ns)))
            at_ns = to_ns
    total_ns, at_ns = sum(left), begin_ns
    for part in (*known, Segment(end_ns, end_ns, NOTHING)):
        gap_ns = part.from_ns - at_ns
        if gap_ns:
            rest = [ns * gap_ns // total_ns for ns in left] if total_ns else NOTHING
            yield Segment(at_ns, part.from_ns, tuple(rest))
        if part.to_ns > part.from_ns:
            yield part
        at_ns = part.to_ns


def _turn(segments: list[Segment], at_ns: int, ns: int, source: Account, target: Account) -> None:
    """The last so many nanoseconds of an account before a moment were another one, as was learned later."""
    place = bisect_left(segments, at_ns, key=lambda part: part.from_ns)
    while place and ns > 0:
        place -= 1
        part = segments[place]
        turned_ns = min(ns, part.amounts[source])
        is_of_one_account = part.amounts[source] == part.to_ns - part.from_ns
        if turned_ns and is_of_one_account and part.amounts[source] != turned_ns:  # its last part
            segments[place : place + 1] = _split(part, part.to_ns - turned_ns)
            part, place = segments[place + 1], place + 1
        if turned_ns:
            turned = plus(plus(part.amounts, source, -turned_ns), target, turned_ns)
            segments[place] = Segment(part.from_ns, part.to_ns, turned)
            ns -= turned_ns


def _points(life: WorkerLifetime, tallies: Iterable[Counters], until_ns: int) -> list[tuple[int, Amounts]]:
    """How much of what had been counted by when, each once and by time."""
    before_ns = life.tally.started_ns - life.started_ns
    points = [(life.started_ns, NOTHING), (life.tally.started_ns, plus(NOTHING, Account.START_UP, before_ns))]
    for tally in tallies:
        if tally.started_ns == life.tally.started_ns and points[-1][0] < tally.since_ns < until_ns:
            points.append((tally.since_ns, plus(tally.amounts(tally.since_ns), Account.START_UP, before_ns)))
    return [*points, (until_ns, plus(life.tally.amounts(until_ns), Account.START_UP, before_ns))]


# --- coarser ----------------------------------------------------------------------------------------------------------


def _cut(parts: Iterable[Segment], edges: Sequence[int]) -> Iterator[Segment]:
    for part in parts:
        rest = part
        place = bisect_left(edges, part.from_ns + 1)
        while place < len(edges) and edges[place] < rest.to_ns:
            first, rest = _split(rest, edges[place])
            yield first
            place += 1
        yield rest


def _split(part: Segment, at_ns: int) -> tuple[Segment, Segment]:
    share = (at_ns - part.from_ns) / (part.to_ns - part.from_ns)
    first = tuple(round(ns * share) for ns in part.amounts)
    rest = tuple(ns - taken for ns, taken in zip(part.amounts, first, strict=True))
    return Segment(part.from_ns, at_ns, first), Segment(at_ns, part.to_ns, rest)


def _is_same_cell(one: Segment, other: Segment, edges: Sequence[int]) -> bool:
    return bisect_left(edges, one.from_ns + 1) == bisect_left(edges, other.to_ns)


def _is_alike(one: Segment, other: Segment) -> bool:
    """Whether both are of one and the same account."""
    accounts = {account for part in (one, other) for account, ns in enumerate(part.amounts) if ns}
    return len(accounts) == 1
