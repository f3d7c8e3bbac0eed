"""The same line again and again, from one worker or from many, becomes one line with a count. Pure: no clock.

A line is shown at once the first few times. From then on it is counted, and the count is told when some seconds have
passed, when a worker that has said it ends, or when there is no more room. Nothing but the screen goes by this.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

#: A line is shown so many times within `WITHIN_S` before it is counted.
SHOWN = 3
WITHIN_S = 10.0
#: So many different lines are remembered; of each so many characters.
MOST_LINES = 256
MOST_TEXT = 300
#: The last line of a worker is kept in full up to this length.
_MOST_LAST = 4096

#: What stands before the words of a line: torch's name of the rank, the place of our own lines, the time of day.
_RANK = re.compile(
    r"\[rank\d+\]:? ?|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:rank \d+)?(?:(?:, )?round \d+)?(?:(?:, )?step \d+)?: "
)
#: What only frames other lines: empty ones, rules, carets, and how Python introduces a traceback.
_FRAME = re.compile(
    r"[\s\W_]*|(\[rank\d+\]:? ?)?(Traceback \(most recent call last\):|During handling of the above exception.*"
    r"|The above exception was the direct cause.*)"
)
_TIME = re.compile(
    r"[\[(]?(?:[A-Z]+:?\s+)?(?:[DIWEF]\d{4}\s+|\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    r"(?:\s?(?:Z|UTC|[+-]\d\d:?\d\d))?"
)


@dataclass(frozen=True)
class Said:
    """A line to be shown as it is.

    Attributes:
        worker: who has said it, by its number on the host.
        stream: "stdout" or "stderr".
        text: without its end.
        same: what makes another line the same as this one; empty: its text.
    """

    worker: int
    stream: str
    text: str
    same: str = ""


@dataclass(frozen=True)
class Again:
    """Lines that were counted instead of shown.

    Attributes:
        workers: who has said them, in order.
        stream: where the first of them went to.
        text: the first of them, maybe cut.
        times: how often each was said without being shown.
        lines: how many different ones, one after the other, this is about.
    """

    workers: tuple[int, ...]
    stream: str
    text: str
    times: int
    lines: int = 1

    def __str__(self) -> str:
        more = "" if self.lines == 1 else f" .. and {self.lines - 1} more lines after it"
        return f"{self.times} more time{'s' if self.times > 1 else ''}: {self.text}{more}"


@dataclass
class _Line:
    stream: str
    text: str
    since_s: float
    shown: int = 0
    held: int = 0
    workers: set[int] = field(default_factory=set)


class Repeats:
    """What was said of late. It remembers a bounded number of lines, cut to a bounded length.

    Args:
        shown: a line is shown so many times within `within_s`.
        within_s: seconds.
        most: so many different lines are remembered; the one that began first makes room.
    """

    def __init__(self, shown: int = SHOWN, within_s: float = WITHIN_S, most: int = MOST_LINES) -> None:
        self._shown, self._within_s, self._most = shown, within_s, most
        self._lines: dict[bytes, _Line] = {}  # by age: the one whose time ends first comes first
        self._last: dict[int, tuple[bytes, Said] | None] = {}
        self._words: dict[int, tuple[str, int]] = {}

    def said(self, line: Said, now_s: float) -> list[Said | Again]:
        """What to show now that this was said.

        Args:
            line: what was said.
            now_s: seconds of a clock that never goes back.
        """
        shown: list[Said | Again] = []
        what = line.same or line.text
        if _FRAME.fullmatch(what):  # without the words before it, it is nothing that could be told of
            words, after = self._words.get(line.worker, ("", 0))
            self._words[line.worker] = (words, after + 1)
            key = _key(f"{words}\n{after}\n{what}")
        else:
            key, self._words[line.worker] = _key(what), (what[:MOST_TEXT], 0)
        known = self._lines.get(key)
        if known is None:
            if len(self._lines) >= self._most:
                shown += _told([self._lines.pop(next(iter(self._lines)))])
            known = self._lines[key] = _Line(line.stream, what[:MOST_TEXT], now_s)
        if known.shown < self._shown:
            known.shown += 1
            self._last[line.worker] = None
            return [*shown, line]
        known.held += 1
        known.workers.add(line.worker)
        self._last[line.worker] = (key, replace(line, text=line.text[:_MOST_LAST]))
        return shown

    def due(self, now_s: float) -> list[Said | Again]:
        """The counts of lines whose time is over; call it every second or so.

        Who has not been said again is forgotten; who has goes on being counted.
        """
        over = []
        for key, line in tuple(self._lines.items()):
            if now_s - line.since_s < self._within_s:
                break
            del self._lines[key]
            over.append(line)
            if line.held:
                self._lines[key] = _Line(line.stream, line.text, now_s, shown=self._shown)
        return _told(over)

    def ended(self, worker: int) -> list[Said | Again]:
        """A worker's process has ended: the counts of what it has said, and its last line if that was only counted."""
        self._words.pop(worker, None)
        last = self._last.pop(worker, None)
        known = None if last is None else self._lines.get(last[0])
        shown: list[Said | Again] = []
        if last is not None and known is not None and worker in known.workers:
            known.held -= 1
            shown = [last[1]]
        about = [line for line in self._lines.values() if worker in line.workers]
        told = _told(about)
        for line in about:
            line.held, line.workers = 0, set()
        return [*told, *shown]

    def rest(self) -> list[Said | Again]:
        """All counts that were not told yet; nothing is remembered any more."""
        lines, self._lines, self._last, self._words = list(self._lines.values()), {}, {}, {}
        return _told(lines)


def _told(lines: Iterable[_Line]) -> list[Said | Again]:
    """One count for lines that follow each other and were said by the same as often: a traceback has many.

    Empty lines are counted with those around them, and not told of alone.
    """
    told: list[Said | Again] = []
    for line in lines:
        if not line.held or not line.text.strip():
            continue
        again = Again(tuple(sorted(line.workers)), line.stream, line.text, line.held)
        before = told[-1] if told else None
        if isinstance(before, Again) and (before.workers, before.stream, before.times) == (
            again.workers, again.stream, again.times,
        ):  # fmt: skip
            told[-1] = Again(before.workers, before.stream, before.text, before.times, before.lines + 1)
        else:
            told.append(again)
    return told


def _key(text: str) -> bytes:
    """The same for lines that are the same but for what `_RANK` and `_TIME` find at their beginning."""
    rank = _RANK.match(text)
    rest = text[rank.end() :] if rank else text
    time = _TIME.match(rest)
    rest = rest[time.end() :] if time else rest
    return hashlib.blake2b(rest.encode(errors="replace"), digest_size=16).digest()
