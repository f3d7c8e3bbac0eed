"""The launcher's log has one line for each event of its host: who, with rank, round and step, and what.

For people, what several workers tell of the same moment is one line, as in `torchelastic events`; as JSON each event is
a line. Saves are shown to people with `--verbose` only, since there may be many.
"""

from __future__ import annotations

import logging

from torchelastic.log_lines import Position, fields
from torchelastic.observe.ledger.ledger_events import LedgerEvent, Save, to_dict
from torchelastic.observe.status.event_lines import LoggedEvent, with_event
from torchelastic.observe.status.host_view import parts_of
from torchelastic.observe.status.run_status import EventLine

#: A logger of its own, so that events are shown where other lines of that level are not.
events_log = logging.getLogger("torchelastic.events")

#: So many events may wait to be put together.
_MOST_PENDING = 1000


class EventLog:
    """Logs each event of the ledger. Use it on the agent's event loop.

    Args:
        host: this host's name.
        each: log each event by itself, at once, with all that it tells: for programs.
    """

    def __init__(self, host: str, *, each: bool = False) -> None:
        self._host, self._each = host, each
        self._pending: list[tuple[float, LedgerEvent]] = []

    def record(self, at_s: float, event: LedgerEvent) -> None:
        """Log it, now or with the next `flush`; when it was, in Unix seconds."""
        self._pending.append((at_s, event))
        if self._each or len(self._pending) >= _MOST_PENDING:
            self.flush()

    def flush(self) -> None:
        """Log what is left."""
        pending, self._pending = self._pending, []
        if self._each:
            for at_s, event in pending:
                for one in with_event((), event, at_s, most=1):
                    line = one.line(self._host)
                    _log(line, _level(event, line), at_s, fields(**_plain(line), event=to_dict(event)))
            return
        told: tuple[LoggedEvent, ...] = ()
        for at_s, event in pending:
            told = with_event(told, event, at_s, most=len(pending))
        for one in told:
            line = one.line(self._host)
            _log(line, _level(one.event, line), one.at_s)


def _level(event: LedgerEvent, line: EventLine) -> int:
    """How urgent an event is, as a level of `logging`: what is marked on the screens is a warning here."""
    if isinstance(event, Save):
        return logging.DEBUG
    return logging.WARNING if line.grade else logging.INFO


def for_people(line: EventLine) -> str:
    """An event as a line of the launcher's log.

    >>> for_people(EventLine(at_s=0.0, host="a", kind="end", text="lost", worker="a-77/1.0", rank=1, round=4, step=12))
    'worker 1 (rank 1, round 4, step 12): lost'
    """
    where = str(Position(line.rank, line.round, line.step))
    if not line.worker:
        return f"{line.text} ({where})" if where else line.text
    place, restarts = parts_of(line.worker)
    again = f"start {restarts + 1}" if restarts else ""
    inside = ", ".join(filter(None, (again, where)))
    return f"worker {place} ({inside}): {line.text}" if inside else f"worker {place}: {line.text}"


def _plain(line: EventLine) -> dict[str, object]:
    names = ("host", "kind", "worker", "rank", "round", "step")
    return {name: getattr(line, name) for name in names}


def _log(line: EventLine, level: int, at_s: float, extra: dict[str, object] | None = None) -> None:
    """As of the time at which it has happened, not of that at which it is written."""
    if not events_log.isEnabledFor(level):
        return
    text = for_people(line) if extra is None else line.text
    record = events_log.makeRecord(events_log.name, level, __file__, 0, text, (), None, extra=extra)
    record.created, record.msecs = at_s, (at_s % 1.0) * 1000
    events_log.handle(record)
