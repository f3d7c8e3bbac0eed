"""Which failures there were: what workers of all hosts report of one moment is one incident. Pure.

Where no member of the group survived, training goes on in new processes: a restart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchelastic.observe.ledger.ledger_events import (
    End,
    Failure,
    FirstStep,
    Join,
    LedgerEvent,
    ReForm,
    Restore,
    is_failure,
)
from torchelastic.observe.report.model import PHASES, AttemptRow, Incident, LostWorker
from torchelastic.observe.report.part import RunEvent

#: Reports of one round within this time of each other are one incident; a new job numbers its rounds from 0 again.
_SAME_INCIDENT_NS = 60_000_000_000
#: A worker says when it noticed a failure twice, from two clocks of the same host.
_SAME_NOTICE_NS = 1_000_000_000
_MOST_CAUSES = 8

_Kind = TypeVar("_Kind", bound=LedgerEvent)


@dataclass
class _Group:
    """What belongs together."""

    round: int
    events: list[RunEvent] = field(default_factory=list)

    @property
    def first_ns(self) -> int:
        """When it began, as far as it is known: the first death, else when it was first noticed."""
        known = [one.at_ns - one.detect_ns for one in self.events if not isinstance(one.event, ReForm)]
        return min(known or [one.at_ns - sum(event.phases_ns.values()) for one, event in self.of(ReForm)])

    @property
    def last_ns(self) -> int:
        return max(one.at_ns for one in self.events)

    def of(self, kind: type[_Kind]) -> list[tuple[RunEvent, _Kind]]:
        return [(one, one.event) for one in self.events if isinstance(one.event, kind)]


def incidents_of(events: Iterable[RunEvent], lives: Sequence[AttemptRow]) -> tuple[Incident, ...]:
    """All incidents, by time.

    Args:
        events: events of all journals, in any order; those that have nothing to do with failures are left out.
        lives: of all workers.
    """
    ordered = sorted(events, key=lambda one: one.at_ns)
    groups = _grouped([one for one in ordered if is_failure(one.event)])
    groups += _with_re_forms(groups, [(one, one.event) for one in ordered if isinstance(one.event, ReForm)])
    groups.sort(key=lambda group: group.first_ns)
    restores = [(one.at_ns, one.event) for one in ordered if isinstance(one.event, Restore)]
    begins_ns = [group.first_ns for group in groups]
    restarts = _Restarts(ordered, lives)
    found = []
    for number, (group, begin_ns) in enumerate(zip(groups, begins_ns, strict=True)):
        first = bisect_left(restores, begin_ns, key=lambda one: one[0])
        end = bisect_left(restores, begins_ns[number + 1], key=lambda one: one[0]) if groups[number + 1 :] else None
        found.append(_incident(number + 1, group, _next_restores(group, restores[first:end]), restarts))
    return tuple(found)


def _grouped(failures: Sequence[RunEvent]) -> list[_Group]:
    groups: list[_Group] = []
    newest: dict[int, _Group] = {}
    for one in failures:
        round_ = one.event.round
        group = newest.get(round_)
        if group is None or round_ < 0 or one.at_ns - group.last_ns > _SAME_INCIDENT_NS:
            group = newest[round_] = _Group(round_)
            groups.append(group)
        group.events.append(one)
    return groups


def _with_re_forms(groups: Sequence[_Group], re_forms: Iterable[tuple[RunEvent, ReForm]]) -> list[_Group]:
    """Put each to the failure that its worker noticed, else to the newest before it; returns those that have none."""
    noticed: dict[str, list[tuple[int, _Group]]] = defaultdict(list)
    begun = sorted(((group.first_ns, group) for group in groups), key=lambda one: one[0])
    for group in groups:
        for one in group.events:
            noticed[one.event.worker].append((one.at_ns, group))
    alone: list[_Group] = []
    for one, event in re_forms:
        noticed_ns = one.at_ns - sum(event.phases_ns.values())
        found = _closest(noticed[event.worker], noticed_ns) or _newest(begun, noticed_ns + _SAME_NOTICE_NS)
        if found is None:
            if not alone or alone[-1].round != event.round - 1:
                alone.append(_Group(event.round - 1))
            found = alone[-1]
        found.events.append(one)
    return alone


def _closest(groups: Sequence[tuple[int, _Group]], at_ns: int) -> _Group | None:
    """The failure that was noticed at that time."""
    place = bisect_left(groups, at_ns, key=lambda one: one[0])
    near = [one for one in groups[max(0, place - 1) : place + 1] if abs(one[0] - at_ns) <= _SAME_NOTICE_NS]
    return min(near, key=lambda one: abs(one[0] - at_ns))[1] if near else None


def _newest(groups: Sequence[tuple[int, _Group]], until_ns: int) -> _Group | None:
    place = bisect_left(groups, until_ns, key=lambda one: one[0]) - 1
    return groups[place][1] if place >= 0 and until_ns - groups[place][0] <= _SAME_INCIDENT_NS else None


def _next_restores(group: _Group, restores: Sequence[tuple[int, Restore]]) -> list[Restore]:
    """How the group received its state after it."""
    later = [event for _, event in restores if event.round != group.round]
    return [event for event in later if event.round == later[0].round]


def _incident(number: int, group: _Group, restores: Sequence[Restore], restarts: _Restarts) -> Incident:
    failures, ends, re_forms = group.of(Failure), group.of(End), group.of(ReForm)
    step = max((one.event.step for one in group.events if not isinstance(one.event, ReForm)), default=-1)
    restart = None if re_forms else restarts.after(group.first_ns, group.last_ns)
    restores = restores if restart is None else restart.restores
    resumed_at = min((event.step for event in restores if event.step >= 0), default=step)
    causes = [event.cause for _, event in re_forms] + [event.cause for _, event in failures]
    sources = {event.source for event in restores if event.source}
    next_worlds = [event.world_size for _, event in re_forms] if restart is None else [restart.world_size]
    return Incident(
        number=number,
        at_ns=group.first_ns,
        round=group.round,
        step=step,
        lost=tuple(LostWorker(name=one.name, at_ns=one.at_ns, how=event.cause or "lost") for one, event in ends),
        causes=tuple(dict.fromkeys(cause for cause in causes if cause))[:_MOST_CAUSES],
        noticed_by=len({event.worker for _, event in failures}),
        replayed_ns=sum(event.replayed_ns - one.detect_ns for one, event in failures),
        detect_ns=sum(one.detect_ns for one, _ in failures),
        steps_back=max(0, step - resumed_at) if step >= 0 else 0,
        restored_from="checkpoint" if "checkpoint" in sources else next(iter(sources), ""),
        re_formed_by=len({event.worker for _, event in re_forms}) if restart is None else restart.workers,
        outlived_by=0 if re_forms else restarts.outlived(group.last_ns),
        phases_ns=_phases(re_forms, failures) if restart is None else restart.phases_ns,
        world_size=max(next_worlds, default=0),
    )


def _phases(
    re_forms: Sequence[tuple[RunEvent, ReForm]], failures: Sequence[tuple[RunEvent, Failure]]
) -> Mapping[str, int]:
    """Of the worker that took longest; empty: nobody trained again."""
    if not re_forms:
        return {}
    last, event = max(re_forms, key=lambda pair: sum(pair[1].phases_ns.values()))
    # a worker that is notified of the loss may still run the user's code: its phases begin then, its step fails later
    notified_ns = last.at_ns - sum(event.phases_ns.values())
    mine = [one for one, failure in failures if failure.worker == event.worker]
    detect_ns = max([0, *(min(one.at_ns, notified_ns) - one.at_ns + one.detect_ns for one in mine)])
    phases = {"detect": detect_ns, **event.phases_ns}
    in_order = (*PHASES, *(name for name in event.phases_ns if name not in PHASES))
    return {name: phases[name] for name in in_order if name in phases}


# --- restarts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Restart:
    """What new processes did after a failure.

    Attributes:
        workers: how many trained again together.
        world_size: of their group.
        restores: how they received their state.
        phases_ns: from the failure to their first committed step, of the worker that took longest.
    """

    workers: int
    world_size: int
    restores: tuple[Restore, ...]
    phases_ns: Mapping[str, int]


class _Restarts:
    """Finds the restart after a failure.

    Args:
        events: events of all journals, by time.
        lives: of all workers.
    """

    def __init__(self, events: Sequence[RunEvent], lives: Sequence[AttemptRow]) -> None:
        self._joins = _of(events, Join)
        self._restores = _of(events, Restore)
        self._lives = lives
        known = _of(events, FirstStep)
        self._firsts = sorted(
            (one for one in (_first_step(life, known) for life in self._lives) if one is not None),
            key=lambda one: one.at_ns,
        )
        self._first_ns = {one.worker: one.at_ns for one in self._firsts}

    def outlived(self, last_ns: int) -> int:
        """How many workers had trained by then and lived on."""
        return sum(self._first_ns.get(life.worker, last_ns) < last_ns < life.until_ns for life in self._lives)

    def after(self, first_ns: int, last_ns: int) -> _Restart | None:
        """The first restart after a failure. None: there was none, or somebody who had trained before lived on.

        Args:
            first_ns: when the failure began.
            last_ns: when the last that is known of it happened.
        """
        place = bisect_right(self._firsts, last_ns, key=lambda one: one.at_ns)
        if self.outlived(last_ns) or place == len(self._firsts):
            return None
        first = self._firsts[place]
        group = [
            one
            for one in self._firsts[place:]
            if one.round == first.round and one.at_ns - first.at_ns <= _SAME_INCIDENT_NS
        ]
        joins = [self._newest(self._joins, one) for one in group]
        restores = [self._newest(self._restores, one) for one in group]
        return _Restart(
            workers=len(group),
            world_size=max((event.world_size for _, event in filter(None, joins)), default=0),
            restores=tuple(event for _, event in filter(None, restores)),
            phases_ns=self._phases(first_ns, max(group, key=lambda one: one.at_ns)),
        )

    def _phases(self, first_ns: int, slowest: _First) -> dict[str, int]:
        joined, restored = self._newest(self._joins, slowest), self._newest(self._restores, slowest)
        restored_ns = slowest.at_ns if restored is None else max(first_ns, restored[0])
        joined_ns = restored_ns if joined is None else max(first_ns, joined[0])
        ends = {"restart": joined_ns - first_ns, "sync": restored_ns - joined_ns, "step": slowest.at_ns - restored_ns}
        return {name: ns for name, ns in ends.items() if ns or name == "restart"}

    @staticmethod
    def _newest(events: Mapping[str, Sequence[tuple[int, _Kind]]], first: _First) -> tuple[int, _Kind] | None:
        """The last of a worker up to its first step."""
        before = [one for one in events.get(first.worker, ()) if one[0] <= first.at_ns]
        return before[-1] if before else None


@dataclass(frozen=True)
class _First:
    """When a worker committed its first step, and in which round."""

    worker: str
    at_ns: int
    round: int


def _first_step(life: AttemptRow, known: Mapping[str, Sequence[tuple[int, FirstStep]]]) -> _First | None:
    if not life.committed:
        return None
    events = known.get(life.worker)
    if not events:
        return _First(life.worker, life.began_ns, -1)  # they were rotated away
    at_ns, event = events[0]
    return _First(life.worker, at_ns, event.round)


def _of(events: Iterable[RunEvent], kind: type[_Kind]) -> dict[str, list[tuple[int, _Kind]]]:
    """Events of one kind by worker, by time."""
    found: dict[str, list[tuple[int, _Kind]]] = {}
    for one in events:
        if isinstance(one.event, kind):
            found.setdefault(one.event.worker, []).append((one.at_ns, one.event))
    return found
