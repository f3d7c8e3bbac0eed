"""Which failures there were: what many workers of many hosts tell of one and the same moment is one incident. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchelastic.ledger.events import End, Event, Failure, ReForm, Restore, is_failure
from torchelastic.report.model import PHASES, Incident, LifeRow, LostWorker
from torchelastic.report.restarts import Restarts
from torchelastic.report.told import SAME_INCIDENT_NS, Told

#: A worker says when it noticed a failure twice, from two clocks of the same host.
_SAME_NOTICE_NS = 1_000_000_000
_MOST_CAUSES = 8

_Kind = TypeVar("_Kind", bound=Event)


@dataclass
class _Group:
    """What belongs together."""

    round: int
    told: list[Told] = field(default_factory=list)

    @property
    def first_ns(self) -> int:
        """When it began, as far as it is known: the first death, else when it was first noticed."""
        known = [one.at_ns - one.detect_ns for one in self.told if not isinstance(one.event, ReForm)]
        return min(known or [one.at_ns - sum(event.phases_ns.values()) for one, event in self.of(ReForm)])

    @property
    def last_ns(self) -> int:
        return max(one.at_ns for one in self.told)

    def of(self, kind: type[_Kind]) -> list[tuple[Told, _Kind]]:
        return [(one, one.event) for one in self.told if isinstance(one.event, kind)]


def incidents_of(told: Iterable[Told], lives: Iterable[LifeRow]) -> tuple[Incident, ...]:
    """All incidents, by time.

    Args:
        told: events of all journals, in any order; those that have nothing to do with failures are left out.
        lives: of all workers.
    """
    ordered = sorted(told, key=lambda one: one.at_ns)
    groups = _grouped([one for one in ordered if is_failure(one.event)])
    groups += _with_re_forms(groups, [(one, one.event) for one in ordered if isinstance(one.event, ReForm)])
    groups.sort(key=lambda group: group.first_ns)
    restores = [(one.at_ns, one.event) for one in ordered if isinstance(one.event, Restore)]
    begins_ns = [group.first_ns for group in groups]
    restarts = Restarts(ordered, lives)
    found = []
    for number, (group, begin_ns) in enumerate(zip(groups, begins_ns, strict=True)):
        first = bisect_left(restores, begin_ns, key=lambda one: one[0])
        end = bisect_left(restores, begins_ns[number + 1], key=lambda one: one[0]) if groups[number + 1 :] else None
        found.append(_incident(number + 1, group, _next_level(group, restores[first:end]), restarts))
    return tuple(found)


def _grouped(failures: Sequence[Told]) -> list[_Group]:
    groups: list[_Group] = []
    newest: dict[int, _Group] = {}
    for one in failures:
        round_ = one.event.round
        group = newest.get(round_)
        if group is None or round_ < 0 or one.at_ns - group.last_ns > SAME_INCIDENT_NS:
            group = newest[round_] = _Group(round_)
            groups.append(group)
        group.told.append(one)
    return groups


def _with_re_forms(groups: Sequence[_Group], re_forms: Iterable[tuple[Told, ReForm]]) -> list[_Group]:
    """Put each to the failure that its worker noticed, else to the newest before it; returns those that have none."""
    noticed: dict[str, list[tuple[int, _Group]]] = defaultdict(list)
    begun = sorted(((group.first_ns, group) for group in groups), key=lambda one: one[0])
    for group in groups:
        for one in group.told:
            noticed[one.event.worker].append((one.at_ns, group))
    alone: list[_Group] = []
    for one, event in re_forms:
        noticed_ns = one.at_ns - sum(event.phases_ns.values())
        found = _closest(noticed[event.worker], noticed_ns) or _newest(begun, noticed_ns + _SAME_NOTICE_NS)
        found = found or _newest_of_round(alone, event.round - 1)
        if found is None:
            alone.append(_Group(event.round - 1))
        (found or alone[-1]).told.append(one)
    return alone


def _closest(groups: Sequence[tuple[int, _Group]], at_ns: int) -> _Group | None:
    """The failure that was noticed at that time."""
    place = bisect_left(groups, at_ns, key=lambda one: one[0])
    near = [one for one in groups[max(0, place - 1) : place + 1] if abs(one[0] - at_ns) <= _SAME_NOTICE_NS]
    return min(near, key=lambda one: abs(one[0] - at_ns))[1] if near else None


def _newest(groups: Sequence[tuple[int, _Group]], until_ns: int) -> _Group | None:
    place = bisect_left(groups, until_ns, key=lambda one: one[0]) - 1
    return groups[place][1] if place >= 0 and until_ns - groups[place][0] <= SAME_INCIDENT_NS else None


def _newest_of_round(groups: Sequence[_Group], round_: int) -> _Group | None:
    return groups[-1] if groups and groups[-1].round == round_ else None


def _next_level(group: _Group, restores: Sequence[tuple[int, Restore]]) -> list[Restore]:
    """How the group was brought level after it."""
    later = [event for _, event in restores if event.round != group.round]
    return [event for event in later if event.round == later[0].round]


def _incident(number: int, group: _Group, restores: Sequence[Restore], restarts: Restarts) -> Incident:
    failures, ends, re_forms = group.of(Failure), group.of(End), group.of(ReForm)
    step = max((one.event.step for one in group.told if not isinstance(one.event, ReForm)), default=-1)
    restart = None if re_forms else restarts.after(group.first_ns, group.last_ns)
    restores = restores if restart is None else restart.restores
    level = min((event.step for event in restores if event.step >= 0), default=step)
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
        steps_back=max(0, step - level) if step >= 0 else 0,
        restored_from="checkpoint" if "checkpoint" in sources else next(iter(sources), ""),
        re_formed_by=len({event.worker for _, event in re_forms}) if restart is None else restart.workers,
        outlived_by=0 if re_forms else restarts.outlived(group.last_ns),
        phases_ns=_phases(re_forms, failures) if restart is None else restart.phases_ns,
        world_size=max(next_worlds, default=0),
    )


def _phases(re_forms: Sequence[tuple[Told, ReForm]], failures: Sequence[tuple[Told, Failure]]) -> Mapping[str, int]:
    """Of the worker that took longest; empty: nobody trained again."""
    if not re_forms:
        return {}
    _told, event = max(re_forms, key=lambda pair: sum(pair[1].phases_ns.values()))
    detect_ns = max((one.detect_ns for one, failure in failures if failure.worker == event.worker), default=0)
    phases = {"detect": detect_ns, **event.phases_ns}
    in_order = (*PHASES, *(name for name in event.phases_ns if name not in PHASES))
    return {name: phases[name] for name in in_order if name in phases}
