"""Where on its time line a life spent what its book says: stretches without gaps, whose sums are the book's exactly.

A worker's counts are known when its agent wrote them down, every ten seconds and whenever something happened. What
events tell lies between them; the rest of an interval is spread over what is left of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchelastic.ledger.accounts import NOTHING, Account, Amounts, added, plus
from torchelastic.ledger.life import Life
from torchelastic.ledger.tally import Tally

#: From which account too much is taken first when less turns out to have been productive than was counted.
_LATER = (Account.REPLAYED, Account.DATA_WAIT, Account.SAVE_STALL, *Account)


@dataclass(frozen=True)
class Stretch:
    """Some time of a life.

    Attributes:
        from_ns, to_ns: when.
        amounts: by account; they sum to its length.
    """

    from_ns: int
    to_ns: int
    amounts: Amounts


@dataclass(frozen=True)
class Span:
    """What an event tells: from here to there it was that."""

    from_ns: int
    to_ns: int
    account: Account


@dataclass(frozen=True)
class Move:
    """So much of what came before a time was another account, as was learned later."""

    at_ns: int
    ns: int
    source: Account
    target: Account


@dataclass
class Story:
    """What a journal tells of one life.

    Attributes:
        tallies: what it had counted, by time.
        spans: what it did.
        moves: what was learned later, by time.
    """

    tallies: list[Tally] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


def stretches(life: Life, story: Story, now_ns: int) -> tuple[Stretch, ...]:
    """The life from its start to its end, or to now; the sums are `life.amounts(now_ns)`.

    Args:
        life: as its book has it in the end.
        story: what is known of its course; the less, the coarser.
        now_ns: by the clock of the journal.
    """
    points = _points(life, story.tallies, life.until_ns(now_ns))
    pieces: list[Stretch] = []
    for (begin_ns, end_ns), amounts in _intervals(points):
        pieces += _placed(begin_ns, end_ns, amounts, story.spans)
    for move in _moves(life, story.moves, points[-1]):
        _move(pieces, move)
    return tuple(pieces)


def cells(parts: Sequence[Stretch], edges: Sequence[int]) -> tuple[Stretch, ...]:
    """The same, coarser: one stretch between two edges, and neighbours of one and the same account together.

    Args:
        parts: in order, without gaps.
        edges: in order; the first and the last are not inside of the parts.
    """
    found: list[Stretch] = []
    for part in _cut(parts, edges):
        last = found[-1] if found else None
        if last is None or not (_is_same_cell(last, part, edges) or _is_alike(last, part)):
            found.append(part)
        else:
            found[-1] = Stretch(last.from_ns, part.to_ns, added(last.amounts, part.amounts))
    return tuple(found)


def split(part: Stretch, at_ns: int) -> tuple[Stretch, Stretch]:
    """Two stretches of one, each with its share of every account, to the nanosecond.

    >>> [half.amounts[:3] for half in split(Stretch(0, 5, (2, 3, 0, 0, 0, 0, 0, 0, 0)), 3)]
    [(2, 1, 0), (0, 2, 0)]
    """
    length_ns, first_ns = part.to_ns - part.from_ns, at_ns - part.from_ns
    shares = [ns * first_ns // length_ns for ns in part.amounts]
    missing_ns = first_ns - sum(shares)
    for place, ns in enumerate(part.amounts):  # what was rounded off: less than one nanosecond per account
        if missing_ns and shares[place] < ns:
            shares[place] += 1
            missing_ns -= 1
    rest = tuple(ns - share for ns, share in zip(part.amounts, shares, strict=True))
    return Stretch(part.from_ns, at_ns, tuple(shares)), Stretch(at_ns, part.to_ns, rest)


# --- what was counted when --------------------------------------------------------------------------------------------

_Point = tuple[int, Amounts]


def _points(life: Life, tallies: Iterable[Tally], until_ns: int) -> list[_Point]:
    """How much of what had been counted by when, each once and by time."""
    before_ns = life.tally.started_ns - life.started_ns
    points: list[_Point] = [(life.started_ns, NOTHING)]
    if before_ns:
        points.append((life.tally.started_ns, plus(NOTHING, Account.START_UP, before_ns)))
    for tally in tallies:
        if tally.started_ns == life.tally.started_ns and points[-1][0] < tally.since_ns < until_ns:
            points.append((tally.since_ns, plus(tally.amounts(tally.since_ns), Account.START_UP, before_ns)))
    if points[-1][0] == until_ns and len(points) > 1:
        points.pop()
    if points[-1][0] < until_ns:
        points.append((until_ns, plus(life.tally.amounts(until_ns), Account.START_UP, before_ns)))
    return points


def _intervals(points: Sequence[_Point]) -> Iterator[tuple[tuple[int, int], Amounts]]:
    """What came in between. Where an account has shrunk (a step under way was lost), it had never been that."""
    grown = [
        [new - old for new, old in zip(later, earlier, strict=True)] for (_, earlier), (_, later) in pairwise(points)
    ]
    for number in range(len(grown) - 1, 0, -1):
        for account in Account:
            if grown[number][account] < 0:
                _carry_back(grown, number, account)
    for ((begin_ns, _), (end_ns, _)), amounts in zip(pairwise(points), grown, strict=True):
        yield (begin_ns, end_ns), tuple(amounts)


def _carry_back(grown: list[list[int]], number: int, account: Account) -> None:
    """An interval has less than nothing of an account: the one before had other accounts instead."""
    interval, before = grown[number], grown[number - 1]
    for other in _LATER:
        moved_ns = min(-interval[account], interval[other]) if other is not account else 0
        if moved_ns > 0:
            interval[account] += moved_ns
            interval[other] -= moved_ns
            before[account] -= moved_ns
            before[other] += moved_ns


# --- where in between -------------------------------------------------------------------------------------------------


def _placed(begin_ns: int, end_ns: int, amounts: Amounts, spans: Sequence[Span]) -> list[Stretch]:
    """An interval with what events tell of it in its place, and the rest of it in between."""
    left, at_ns = list(amounts), begin_ns
    known: list[Stretch] = []
    first = bisect_left(spans, begin_ns, key=lambda span: span.to_ns)
    for span in spans[first:]:
        if span.from_ns >= end_ns:
            break
        to_ns = min(span.to_ns, end_ns)
        from_ns = max(span.from_ns, at_ns, to_ns - left[span.account])  # where less was counted: the last part of it
        if to_ns > from_ns:
            left[span.account] -= to_ns - from_ns
            known.append(Stretch(from_ns, to_ns, plus(NOTHING, span.account, to_ns - from_ns)))
            at_ns = to_ns
    return _with_rest(begin_ns, end_ns, known, tuple(left))


def _with_rest(begin_ns: int, end_ns: int, known: Sequence[Stretch], left: Amounts) -> list[Stretch]:
    pieces: list[Stretch] = []
    rest = Stretch(0, sum(left), left)
    at_ns = begin_ns
    for part in (*known, Stretch(end_ns, end_ns, NOTHING)):
        gap_ns = part.from_ns - at_ns
        if gap_ns:
            taken, rest = split(rest, rest.from_ns + gap_ns)
            pieces.append(Stretch(at_ns, part.from_ns, taken.amounts))
        if part.to_ns > part.from_ns:
            pieces.append(part)
        at_ns = part.to_ns
    return pieces


# --- what was learned later -------------------------------------------------------------------------------------------


def _moves(life: Life, moves: Sequence[Move], end: _Point) -> Iterator[Move]:
    """The moves, and at the end of the life what is not in them, so that the sums are those of `Life.amounts`."""
    until_ns, counted = end
    lost_ns = min(life.lost_ns, counted[Account.PRODUCTIVE])
    detected_ns = min(life.detected_ns, counted[Account.REPLAYED] + lost_ns)
    for source, target, total_ns in (
        (Account.PRODUCTIVE, Account.REPLAYED, lost_ns),
        (Account.REPLAYED, Account.DETECT, detected_ns),
    ):
        for move in moves:
            if (move.source, move.target) == (source, target) and total_ns:
                ns = min(move.ns, total_ns)
                total_ns -= ns
                yield Move(min(move.at_ns, until_ns), ns, source, target)
        if total_ns:
            yield Move(until_ns, total_ns, source, target)


def _move(pieces: list[Stretch], move: Move) -> None:
    """Taken from what lies just before the time of the move; what is not there is taken from the end."""
    place = bisect_left(pieces, move.at_ns, key=lambda piece: piece.to_ns)
    if place < len(pieces) and pieces[place].from_ns < move.at_ns < pieces[place].to_ns:
        pieces[place : place + 1] = split(pieces[place], move.at_ns)
    left_ns = _taken(pieces, move, range(min(place, len(pieces) - 1), -1, -1), move.ns)
    if left_ns:
        _taken(pieces, move, range(len(pieces) - 1, -1, -1), left_ns)


def _taken(pieces: list[Stretch], move: Move, places: Iterable[int], ns: int) -> int:
    """Turn so much of these pieces, which come last first; returns what is left to be turned."""
    for place in places:
        part = pieces[place]
        turned_ns = min(ns, part.amounts[move.source])
        if turned_ns and part.amounts[move.source] == part.to_ns - part.from_ns != turned_ns:
            pieces[place : place + 1] = split(part, part.to_ns - turned_ns)  # of one account: its last part
            part, place = pieces[place + 1], place + 1
        if turned_ns:
            turned = plus(plus(part.amounts, move.source, -turned_ns), move.target, turned_ns)
            pieces[place] = Stretch(part.from_ns, part.to_ns, turned)
            ns -= turned_ns
        if not ns:
            return 0
    return ns


# --- coarser ----------------------------------------------------------------------------------------------------------


def _cut(parts: Iterable[Stretch], edges: Sequence[int]) -> Iterator[Stretch]:
    for part in parts:
        rest = part
        place = bisect_left(edges, part.from_ns + 1)
        while place < len(edges) and edges[place] < rest.to_ns:
            first, rest = split(rest, edges[place])
            yield first
            place += 1
        yield rest


def _is_same_cell(one: Stretch, other: Stretch, edges: Sequence[int]) -> bool:
    return bisect_left(edges, one.from_ns + 1) == bisect_left(edges, other.to_ns)


def _is_alike(one: Stretch, other: Stretch) -> bool:
    """Whether both are of one and the same account."""
    return any(
        one.amounts[account] == one.to_ns - one.from_ns and other.amounts[account] == other.to_ns - other.from_ns
        for account in Account
    )
