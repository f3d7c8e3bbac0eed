"""How training went on after a failure that no member of the group survived: in new processes. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchelastic.ledger.events import Event, FirstStep, Join, Restore
from torchelastic.report.model import LifeRow
from torchelastic.report.told import SAME_INCIDENT_NS, Told

_Kind = TypeVar("_Kind", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Restart:
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


class Restarts:
    """Finds the restart after a failure.

    Args:
        told: events of all journals, by time.
        lives: of all workers.
    """

    def __init__(self, told: Iterable[Told], lives: Iterable[LifeRow]) -> None:
        events = list(told)
        self._joins = _of(events, Join)
        self._restores = _of(events, Restore)
        self._lives = list(lives)
        known = _of(events, FirstStep)
        self._firsts = sorted(
            (one for one in (_first_step(life, known, self._restores) for life in self._lives) if one is not None),
            key=lambda one: one.at_ns,
        )
        self._first_ns = {one.worker: one.at_ns for one in self._firsts}

    def outlived(self, last_ns: int) -> int:
        """How many workers had trained by then and lived on."""
        return sum(self._first_ns.get(life.worker, last_ns) < last_ns < life.until_ns for life in self._lives)

    def after(self, first_ns: int, last_ns: int) -> Restart | None:
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
            if one.round == first.round and one.at_ns - first.at_ns <= SAME_INCIDENT_NS
        ]
        joins = [self._newest(self._joins, one) for one in group]
        restores = [self._newest(self._restores, one) for one in group]
        return Restart(
            workers=len(group),
            world_size=max((event.world_size for _, event in filter(None, joins)), default=0),
            restores=tuple(event for _, event in filter(None, restores)),
            phases_ns=self._phases(first_ns, max(group, key=lambda one: one.at_ns)),
        )

    def _phases(self, first_ns: int, slowest: _First) -> dict[str, int]:
        joined, restored = self._newest(self._joins, slowest), self._newest(self._restores, slowest)
        level_ns = slowest.at_ns if restored is None else max(first_ns, restored[0])
        joined_ns = level_ns if joined is None else max(first_ns, joined[0])
        ends = {"restart": joined_ns - first_ns, "sync": level_ns - joined_ns, "step": slowest.at_ns - level_ns}
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


def _first_step(
    life: LifeRow,
    known: Mapping[str, Sequence[tuple[int, FirstStep]]],
    restores: Mapping[str, Sequence[tuple[int, Restore]]],
) -> _First | None:
    """Journals of earlier versions do not say it: there it is when the state was restored."""
    if not life.committed:
        return None
    events = known.get(life.worker) or restores.get(life.worker) or ()
    if not events:
        return _First(life.worker, life.began_ns, -1)  # its events were rotated away
    at_ns, event = events[0]
    return _First(life.worker, at_ns, event.round)


def _of(told: Iterable[Told], kind: type[_Kind]) -> dict[str, list[tuple[int, _Kind]]]:
    """Events of one kind by worker, by time."""
    found: dict[str, list[tuple[int, _Kind]]] = {}
    for one in told:
        if isinstance(one.event, kind):
            found.setdefault(one.event.worker, []).append((one.at_ns, one.event))
    return found
