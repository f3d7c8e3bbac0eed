"""What a source was told, and a deadline that is made of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

log = logging.getLogger(__name__)

#: "end": known beforehand. "interruption", "maintenance": the platform takes the machine. "signal": to this process.
#: "advice": no deadline, only something to know.
Kind = Literal["end", "interruption", "maintenance", "signal", "advice"]

#: A date in an HTTP header has whole seconds, rounded down: so much may be less left than it seems.
_DATE_RESOLUTION_S = 1.0


class Clocks(TypedDict, total=False):
    """The clocks of a source: `clock` in monotonic seconds, that of the deadline, and `wall_clock` in Unix seconds."""

    clock: Callable[[], float]
    wall_clock: Callable[[], float]


class Timing(Clocks, total=False):
    """The clocks of a source, and `interval_s`: seconds between two polls."""

    interval_s: float


class InvalidAnswerError(ValueError):
    """Somebody answered, and it is not what the protocol says; the text says who and what."""


@dataclass(frozen=True)
class Notice:
    """Somebody has said when this process or its machine ends.

    Args:
        source: who said it.
        kind: see `Kind`.
        at_s: when, in monotonic seconds; None: at any moment from now on.
        reason: what was said, one short phrase.
        unsure_since_s: when it came, if nobody has said how much time there is from then on: `at_s` is a guess, and the
            end may come earlier. None: `at_s` is known.
    """

    source: str
    kind: Kind
    at_s: float | None
    reason: str
    unsure_since_s: float | None = None

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds until then, negative if it is over; 0 for "at any moment"; None for advice."""
        if self.kind == "advice":
            return None
        return 0.0 if self.at_s is None else self.at_s - now_s


@dataclass(frozen=True)
class Event:
    """What a platform announces, as its protocol says it; neither date nor lead: it has begun.

    Args:
        kind: see `Kind`.
        reason: for people.
        date_s: when, in Unix seconds by the clock of the platform.
        lead_s: so long after the announcement has appeared; with a date: it is never later than that.
        is_lead_sure: whether `lead_s` is what the platform gives, and not the most that it may give.
    """

    kind: Kind
    reason: str
    date_s: float | None = None
    lead_s: float | None = None
    is_lead_sure: bool = True

    def notice(self, source: str, *, now_s: float, appeared_s: float, platform_s: float) -> Notice:
        """The same in monotonic time.

        Args:
            source: who announces it.
            now_s: the moment of reading, monotonic.
            appeared_s: since when it may have been there, monotonic.
            platform_s: the moment of reading in Unix seconds, by the clock of the platform if it tells its own.
        """
        if self.kind == "advice":
            return Notice(source, self.kind, None, self.reason)
        moments = []
        if self.date_s is not None:
            moments.append(now_s + self.date_s - platform_s - _DATE_RESOLUTION_S)
        if self.lead_s is not None:
            moments.append(appeared_s + self.lead_s)
        unsure_since_s = None if self.is_lead_sure else now_s
        return Notice(source, self.kind, min(moments, default=None), self.reason, unsure_since_s)


class Notices:
    """A deadline from any number of notices, which come, move and go; the nearest counts. Fulfils `Deadline`.

    Notices are told from one thread, and the deadline is asked from any.

    Args:
        name: of the source, for people.
        idle: the reason while nothing is announced.
    """

    def __init__(self, name: str, idle: str) -> None:
        self.name = name
        self._idle = idle
        self._notices: tuple[Notice, ...] = ()
        self._on_close: list[Callable[[], None]] = []

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What has been said and was not taken back, advice too."""
        return self._notices

    @property
    def reason(self) -> str:
        """The nearest notice; else where it would come from."""
        nearest = self._nearest()
        return self._idle if nearest is None else nearest.reason

    def remaining_s(self, now_s: float) -> float | None:
        """See `Deadline`."""
        nearest = self._nearest()
        return None if nearest is None else nearest.remaining_s(now_s)

    def unsure_since_s(self) -> float | None:
        """When the newest notice came whose end is a guess, in monotonic seconds; None: there is none."""
        known = (notice.unsure_since_s for notice in self._notices)
        return max((since_s for since_s in known if since_s is not None), default=None)

    def tell(self, notices: Iterable[Notice]) -> None:
        """From now on these count, and no others."""
        told = tuple(notices)
        known = {(notice.kind, notice.reason) for notice in self._notices}
        for notice in told:
            if (notice.kind, notice.reason) not in known:
                log.warning("%s: %s", self.name, notice.reason)
        left = {(notice.kind, notice.reason) for notice in told}
        for notice in self._notices:
            if (notice.kind, notice.reason) not in left:
                log.warning("%s: no longer: %s", self.name, notice.reason)
        self._notices = told

    def when_closed(self, close: Callable[[], None]) -> None:
        """Have something done by `close`."""
        self._on_close.append(close)

    def close(self) -> None:
        """No more news: what was announced stays. Idempotent."""
        while self._on_close:
            self._on_close.pop()()

    def _nearest(self) -> Notice | None:
        """The notice that counts; "at any moment" is nearer than every date."""
        known = [notice for notice in self.notices if notice.kind != "advice"]
        return min(known, key=lambda notice: -math.inf if notice.at_s is None else notice.at_s, default=None)
