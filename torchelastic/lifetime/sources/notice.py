"""Notices that this process or its machine will end, and the deadline that they make."""

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


class InvalidAnswerError(ValueError):
    """An answer that is not what the protocol says; the message says whose and what."""


@dataclass(frozen=True)
class Notice:
    """One announcement of when this process or its machine ends.

    Args:
        source: its name, for people.
        kind: see `Kind`.
        at_s: when, in monotonic seconds; None: at any moment from now on.
        reason: what was announced, one short phrase.
        unsure_since_s: when it was received, if it does not say how much time there is: `at_s` is a guess, and the end
            may come earlier. None: `at_s` is known.
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
    """What a platform announces, as in its protocol; without date and lead time: it has begun.

    Args:
        kind: see `Kind`.
        reason: for people.
        date_s: when, in Unix seconds by the clock of the platform.
        lead_s: so long after the announcement has appeared; with a date: it is never later than that.
        is_lead_sure: whether `lead_s` is guaranteed, and not the most that the platform may give.
    """

    kind: Kind
    reason: str
    date_s: float | None = None
    lead_s: float | None = None
    is_lead_sure: bool = True

    def notice(self, source: str, *, now_s: float, appeared_s: float, platform_s: float) -> Notice:
        """The same in monotonic time.

        Args:
            source: its name.
            now_s: the moment of reading, monotonic.
            appeared_s: since when it may have been there, monotonic.
            platform_s: the moment of reading in Unix seconds, by the clock of the platform if that is known.
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
    """A `Deadline` made of any number of notices, which come, move and go; the nearest counts.

    Notices are published by one thread, and the deadline is sampled by any.

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
        """Those that were not withdrawn, advice too."""
        return self._notices

    @property
    def reason(self) -> str:
        """That of the nearest notice; else where one would come from."""
        nearest = self._nearest()
        return self._idle if nearest is None else nearest.reason

    def remaining_s(self, now_s: float) -> float | None:
        """See `Deadline`."""
        nearest = self._nearest()
        return None if nearest is None else nearest.remaining_s(now_s)

    def unsure_since_s(self) -> float | None:
        """See `deadline.unsure_since_s`."""
        known = (notice.unsure_since_s for notice in self._notices)
        return max((since_s for since_s in known if since_s is not None), default=None)

    def tell(self, notices: Iterable[Notice]) -> None:
        """From now on these count, and no others."""
        before = {(notice.kind, notice.reason): None for notice in self._notices}
        self._notices = tuple(notices)
        now = {(notice.kind, notice.reason): None for notice in self._notices}
        for _, reason in (one for one in now if one not in before):
            log.warning("%s: %s", self.name, reason)
        for _, reason in (one for one in before if one not in now):
            log.warning("%s: no longer: %s", self.name, reason)

    def when_closed(self, close: Callable[[], None]) -> None:
        """Add something that `close` does."""
        self._on_close.append(close)

    def close(self) -> None:
        """No more notices; those so far stay. Idempotent."""
        while self._on_close:
            self._on_close.pop()()

    def _nearest(self) -> Notice | None:
        # "at any moment" is nearer than every date
        known = [notice for notice in self.notices if notice.kind != "advice"]
        return min(known, key=lambda notice: -math.inf if notice.at_s is None else notice.at_s, default=None)
