"""A ledger's events as lines for people. What several workers of a host tell of the same moment is one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torchelastic.foreign_json import MAX_TEXT
from torchelastic.ledger.events import (
    Drain,
    End,
    Event,
    Failure,
    FirstStep,
    Join,
    Loss,
    ReForm,
    Restore,
    Save,
    Start,
    StoreOutage,
    Straggler,
)
from torchelastic.status.run_status import EventLine
from torchelastic.text import duration, escaped

T = TypeVar("T")

#: What workers tell of one moment is told within this time of each other.
SAME_MOMENT_S = 5.0
#: Among so many of the newest lines one is looked for that tells of the same.
_LOOK_BACK = 8
#: Where a line has to go, rather one of these.
_ROUTINE = (Save.kind, Restore.kind)
_OF_ALL = (Start, Join, Failure, Restore, ReForm, FirstStep, Save)


@dataclass(frozen=True)
class Told:
    """One line.

    Attributes:
        at_s: when, in Unix seconds.
        event: the one of those told that took longest.
        workers: who tells it; empty: the host.
    """

    at_s: float
    event: Event
    workers: tuple[str, ...]

    def line(self, host: str) -> EventLine:
        """For people."""
        event, count = self.event, len(self.workers)
        is_one = count < 2
        text = _TEXTS[type(event)](event if is_one else replace(event, rank=-1))
        because = "" if not event.cause or text.endswith(event.cause) else f": {event.cause}"
        return EventLine(
            at_s=self.at_s,
            host=host,
            kind=event.kind,
            text=escaped(f"{text}{because}" if is_one else f"{count} workers: {text}{because}")[:MAX_TEXT],
            worker=escaped(event.worker)[:MAX_TEXT] if is_one else "",
            rank=event.rank if is_one else -1,
            round=event.round,
            step=event.step,
        )


def with_event(told: tuple[Told, ...], event: Event, at_s: float, most: int) -> tuple[Told, ...]:
    """The lines once this has happened, too.

    Args:
        told: so far, oldest first.
        event: what has happened; counts are no news.
        at_s: when, in Unix seconds.
        most: so many lines are kept, see `newest`.
    """
    if type(event) not in _TEXTS:
        return told
    if isinstance(event, _OF_ALL):
        for place in range(len(told) - 1, max(-1, len(told) - 1 - _LOOK_BACK), -1):
            if _is_same(told[place], event, at_s):
                return (*told[:place], _together(told[place], event), *told[place + 1 :])
    return newest((*told, Told(at_s, event, (event.worker,) if event.worker else ())), most, lambda one: one.event.kind)


def newest(lines: Sequence[T], most: int, kind_of: Callable[[T], str]) -> tuple[T, ...]:
    """So many of the lines, oldest first: of each kind the newest, and of the kinds with many lines the fewer.

    So what happens all the time, such as saves, pushes out what happens rarely, such as losses, only where all kinds
    have as many lines.

    >>> newest(["save 1", "loss 2", "save 3", "save 4", "save 5"], 3, lambda line: line[:4])
    ('loss 2', 'save 4', 'save 5')
    """
    if len(lines) <= most:
        return tuple(lines)
    counts = Counter(map(kind_of, lines))
    for _ in range(len(lines) - most):
        counts[max(counts, key=lambda kind: (counts[kind], kind in _ROUTINE))] -= 1
    kept = []
    for line in reversed(lines):
        if counts[kind_of(line)]:
            counts[kind_of(line)] -= 1
            kept.append(line)
    return tuple(reversed(kept))


def lines_of(host: str, events: Iterable[tuple[float, Event]]) -> tuple[EventLine, ...]:
    """The lines of many events: (when in Unix seconds, what), oldest first."""
    done: list[Told] = []
    told: tuple[Told, ...] = ()
    for at_s, event in events:
        told = with_event(told, event, at_s, most=2 * _LOOK_BACK)
        if len(told) > _LOOK_BACK:  # what is so far back is not changed any more
            done += told[:-_LOOK_BACK]
            told = told[-_LOOK_BACK:]
    return tuple(one.line(host) for one in (*done, *told))


def _is_same(one: Told, event: Event, at_s: float) -> bool:
    other = one.event
    alike = (type(other), other.round, other.step) == (type(event), event.round, event.step)
    return alike and event.worker not in one.workers and abs(at_s - one.at_s) <= SAME_MOMENT_S


def _together(one: Told, event: Event) -> Told:
    longer = max(one.event, event, key=_took_ns)
    cause = one.event.cause or event.cause
    return replace(one, event=replace(longer, cause=cause), workers=(*one.workers, event.worker))


def _took_ns(event: Event) -> int:
    if isinstance(event, Failure):
        return event.replayed_ns
    if isinstance(event, Restore):
        return event.took_ns
    if isinstance(event, ReForm):
        return sum(event.phases_ns.values())
    return event.stall_ns if isinstance(event, Save) else 0


# --- texts ------------------------------------------------------------------------------------------------------------


def _start(_event: Start) -> str:
    return "started"


def _end(event: End) -> str:
    what = "lost" if event.is_loss else "ended"
    if event.exit_code is None:
        return what
    how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"exit code {event.exit_code}"
    return f"{what}, {how}"


def _join(event: Join) -> str:
    rank = f" as rank {event.rank}" if event.rank >= 0 else ""
    return f"{'joined' if event.is_first else 'again in'} round {event.round}{rank} of {event.world_size}"


def _loss(event: Loss) -> str:
    return f"{event.member} was lost ({event.certainty})"


def _failure(event: Failure) -> str:
    which = f"the step after {event.step}" if event.step >= 0 else "a step"
    what = "was undone" if event.is_undone else "failed and was not undone, as the state has no snapshot"
    return f"{which} {what}, {duration(event.replayed_ns)} of work"


def _restore(event: Restore) -> str:
    source = f" from a {event.source}" if event.source else ""
    return f"level at step {event.step}{source}, {duration(event.took_ns)}"


def _re_form(event: ReForm) -> str:
    phases = ", ".join(f"{name} {duration(ns)}" for name, ns in event.phases_ns.items())
    return f"trains again after {duration(sum(event.phases_ns.values()))}" + (f" ({phases})" if phases else "")


def _first_step(_event: FirstStep) -> str:
    return "committed its first step"


def _save(event: Save) -> str:
    tier = f" to {event.tier}" if event.tier else ""
    return f"saved step {event.step}{tier}, stood still for {duration(event.stall_ns)}"


def _drain(event: Drain) -> str:
    return f"left the run in order after step {event.step}"


def _straggler(event: Straggler) -> str:
    return f"slow: {event.relative_percent:.0f} % of the best"


def _outage(event: StoreOutage) -> str:
    return f"etcd is back after {duration(event.away_ns)}" if event.is_over else "etcd is away, training goes on"


_TEXTS: dict[type[Event], Callable[[Any], str]] = {
    Start: _start,
    End: _end,
    Join: _join,
    Loss: _loss,
    Failure: _failure,
    Restore: _restore,
    ReForm: _re_form,
    FirstStep: _first_step,
    Save: _save,
    Drain: _drain,
    Straggler: _straggler,
    StoreOutage: _outage,
}
