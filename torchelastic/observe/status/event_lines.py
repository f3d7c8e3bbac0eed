"""A ledger's events as lines for people; reports of several workers of a host on one moment are one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torchelastic.foreign_json import MAX_TEXT
from torchelastic.observe.ledger.ledger_events import (
    ComputesWrong,
    Drain,
    End,
    Failure,
    FirstStep,
    Join,
    LedgerEvent,
    MayHang,
    ReForm,
    Restore,
    Save,
    Skipped,
    Start,
    StoreOutage,
    Straggler,
)
from torchelastic.observe.status.run_status import BAD, MOST_EVENTS, WARNING, EventLine
from torchelastic.text import duration, escaped

T = TypeVar("T")

#: Reports of workers on one moment are within this time of each other.
SAME_MOMENT_S = 5.0
#: A line about the same moment is among so many of the newest.
_LOOK_BACK = 8
#: Lines of these kinds are dropped first.
_ROUTINE = (Save.kind, Restore.kind)
_OF_ALL = (Start, Join, Failure, Restore, ReForm, FirstStep, Save)
_KINDS_OF_ALL = frozenset(kind.kind for kind in _OF_ALL)
#: So many lines are remembered for each host that was ever seen: what a host shows is always among its newest.
_REMEMBERED = 4 * MOST_EVENTS

#: What distinguishes one event from another while the text of its line still grows.
_Key = tuple[str, str, float, int, str]


@dataclass(frozen=True)
class LoggedEvent:
    """One line.

    Attributes:
        at_s: when, in Unix seconds.
        event: of those reported, the one that took longest.
        workers: who reports it; empty: the host.
    """

    at_s: float
    event: LedgerEvent
    workers: tuple[str, ...]

    def line(self, host: str) -> EventLine:
        """For people."""
        event, count = self.event, len(self.workers)
        is_one = count < 2
        text = sentence(event) if is_one else f"{count} workers: {sentence(replace(event, rank=-1))}"
        return EventLine(
            at_s=self.at_s,
            host=host,
            kind=event.kind,
            text=escaped(text)[:MAX_TEXT],
            worker=escaped(event.worker)[:MAX_TEXT] if is_one else "",
            rank=event.rank if is_one else -1,
            round=event.round,
            step=event.step,
            grade=_grade(event),
            world_size=event.world_size if isinstance(event, (Join, ReForm)) else 0,
        )


def with_event(logged: tuple[LoggedEvent, ...], event: LedgerEvent, at_s: float, most: int) -> tuple[LoggedEvent, ...]:
    """The lines once this has happened, too.

    Args:
        logged: so far, oldest first.
        event: what has happened; counts are no news.
        at_s: when, in Unix seconds.
        most: so many lines are kept, see `newest`.
    """
    if not sentence(event):
        return logged
    if isinstance(event, _OF_ALL):
        for place in range(len(logged) - 1, max(-1, len(logged) - 1 - _LOOK_BACK), -1):
            if _is_same(logged[place], event, at_s):
                return (*logged[:place], _joined(logged[place], event), *logged[place + 1 :])
    return newest(
        (*logged, LoggedEvent(at_s, event, (event.worker,) if event.worker else ())), most, lambda one: one.event.kind
    )


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


def lines_of(host: str, events: Iterable[tuple[float, LedgerEvent]]) -> tuple[EventLine, ...]:
    """The lines of many events: (when in Unix seconds, what), oldest first."""
    done: list[LoggedEvent] = []
    logged: tuple[LoggedEvent, ...] = ()
    for at_s, event in events:
        logged = with_event(logged, event, at_s, most=2 * _LOOK_BACK)
        if len(logged) > _LOOK_BACK:  # what is so far back is not changed any more
            done += logged[:-_LOOK_BACK]
            logged = logged[-_LOOK_BACK:]
    return tuple(one.line(host) for one in (*done, *logged))


def _is_same(one: LoggedEvent, event: LedgerEvent, at_s: float) -> bool:
    other = one.event
    alike = (type(other), other.round, other.step) == (type(event), event.round, event.step)
    return alike and event.worker not in one.workers and abs(at_s - one.at_s) <= SAME_MOMENT_S


def _joined(one: LoggedEvent, event: LedgerEvent) -> LoggedEvent:
    longer = max(one.event, event, key=_took_ns)
    cause = one.event.cause or event.cause
    return replace(one, event=replace(longer, cause=cause), workers=(*one.workers, event.worker))


def _took_ns(event: LedgerEvent) -> int:
    if isinstance(event, Failure):
        return event.replayed_ns
    if isinstance(event, Restore):
        return event.took_ns
    if isinstance(event, ReForm):
        return sum(event.phases_ns.values())
    return event.stall_ns if isinstance(event, Save) else 0


def sentence(event: LedgerEvent) -> str:
    """What happened and why, for people, without who and when; empty: it is no news."""
    text = _text(event)
    return f"{text}: {event.cause}" if text and event.cause and not text.endswith(event.cause) else text


def _grade(event: LedgerEvent) -> str:
    match event:
        case Failure() | ComputesWrong() | End(is_loss=True) | StoreOutage(is_over=False):
            return BAD
        case Skipped() | Straggler() | MayHang():
            return WARNING
    return ""


def _text(event: LedgerEvent) -> str:
    match event:
        case Start():
            return "started"
        case End():
            return _end_text(event)
        case Join():
            rank = f" as rank {event.rank}" if event.rank >= 0 else ""
            verb = "joined" if event.is_first else "re-formed:"
            return f"{verb} round {event.round}{rank}, world size {event.world_size}"
        case Failure():
            which = f"the step after {event.step}" if event.step >= 0 else "a step"
            what = "was undone" if event.is_undone else "failed and was not undone, as the state has no snapshot"
            return f"{which} {what}, {duration(event.replayed_ns)} of work"
        case Restore():
            has_received = event.source and event.from_step != event.step  # else it kept its own state
            source = f" from a {event.source}" if has_received else ""
            at = f" at step {event.step}" if event.step >= 0 else ""
            return f"in sync{at}{source}, {duration(event.took_ns)}"
        case ReForm():
            phases = ", ".join(f"{name} {duration(ns)}" for name, ns in event.phases_ns.items())
            return f"trains again after {duration(_took_ns(event))}" + (f" ({phases})" if phases else "")
        case FirstStep():
            return "committed its first step"
        case Save():
            tier = f" to {event.tier}" if event.tier else ""
            step = f" step {event.step}" if event.step >= 0 else ""
            return f"saved{step}{tier}, training stopped for {duration(event.stall_ns)}"
        case Drain():
            where = f" after step {event.step}" if event.step >= 0 else ", in no group yet" if event.round < 0 else ""
            return f"left the run in order{where}"
        case Skipped():
            return f"step {event.step} is skipped" + (f", {event.samples} samples" if event.samples else "")
        case Straggler():
            return f"slow: {event.relative_percent:.0f} % of the best"
        case ComputesWrong():
            return "computes wrong: it leaves the run, and is not started again on its host"
        case MayHang():
            return f"may hang: idle {event.for_s:.0f} s of {event.bound_s:.0f} s, a guess"
        case StoreOutage():
            away = "etcd is unreachable, training goes on as long as no worker is lost"
            return f"etcd is back after {duration(event.away_ns)}" if event.is_over else away
    return ""


def _end_text(event: End) -> str:
    what = "lost" if event.is_loss else "ended"
    if event.exit_code is None:
        return what
    how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"exit code {event.exit_code}"
    return f"{what}, {how}"


# --- which lines are new ----------------------------------------------------------------------------------------------


@dataclass
class EventFollower:
    """Which lines of a run are new, each once. A line of several workers grows while they report: it waits for that.

    Attributes:
        shown: by host, the newest that were given out.
        waiting: lines that are new, as they were last seen.
    """

    shown: dict[str, list[_Key]] = field(default_factory=dict)
    waiting: dict[_Key, EventLine] = field(default_factory=dict)

    def news(self, lines: Sequence[EventLine], *, is_last: bool = False) -> list[EventLine]:
        """The lines that are to be shown now, oldest first.

        Args:
            lines: all that the hosts show at the moment.
            is_last: whether nothing will be asked for any more: whatever is new is shown as it is.
        """
        found = {_key(line): line for line in lines if _key(line) not in self.shown.get(line.host, ())}
        # a host that has ended reports nothing more: its line is stable, too
        settled = {key: line for key, line in self.waiting.items() if found.get(key, line) == line}
        if is_last:
            settled = {**settled, **found}
        self.waiting = {key: line for key, line in found.items() if key not in settled}
        for key, line in settled.items():
            self.shown[line.host] = [*self.shown.get(line.host, ()), key][-_REMEMBERED:]
        return sorted(settled.values(), key=lambda line: line.at_s)


def _key(line: EventLine) -> _Key:
    worker = "" if line.kind in _KINDS_OF_ALL else line.worker  # until another one reports the same
    return (line.host, line.kind, line.at_s, line.round, worker)
