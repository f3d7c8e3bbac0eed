"""The status of one host: its ledger and what else its agent knows, as a `HostStatus`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchelastic.observe.ledger.figures import Seen, seen
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.ledger_events import LedgerEvent, Restore
from torchelastic.observe.ledger.worker_lifetime import WorkerLifetime
from torchelastic.observe.status.event_lines import LoggedEvent, newest, with_event
from torchelastic.observe.status.run_progress import Pace, Progress
from torchelastic.observe.status.run_status import MOST_EVENTS, MOST_VALUES, EventLine, HostStatus, WorkerStatus
from torchelastic.rendezvous.records import NO_ROUND, Round
from torchelastic.version import __version__

#: So many of the newest events are kept for those who ask the agent itself.
KEPT_EVENTS = 300
#: Of a published name so many characters are shown.
_MOST_NAME = 64
_OWN_GROUP = "torchelastic"
_LIFE = re.compile(r"(?P<place>.+)\.(?P<restarts>\d+)")


def seen_of(ledger: HostLedger, now_ns: int, configured_workers: int = 0) -> Seen:
    """What one host has shown up to now, from the first start of a worker on.

    Args:
        ledger: of the host.
        now_ns: by its clock.
        configured_workers: places that the host has; 0: not known, so missing workers are not counted.
    """
    first_ns = now_ns if ledger.counts.first_ns is None else ledger.counts.first_ns
    return seen([ledger], [now_ns], wall_ns=max(0, now_ns - first_ns), configured_workers=configured_workers)


def parts_of(worker: str) -> tuple[str, int]:
    """The place of a worker on its host, and how often it was started there before.

    >>> parts_of("node-7.example/0.2"), parts_of("node-7/p")
    (('0', 2), ('p', 0))
    """
    name = worker.rpartition("/")[2]
    match = _LIFE.fullmatch(name)
    return (match["place"], int(match["restarts"])) if match else (name, 0)


def published_values(items: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Of what a worker has published, (group, name, value), what a person wants to see: not the library's own figures.

    >>> published_values([("torchelastic", "train_step.duration.ms", 3.0), ("mine", "loss", 0.5)])
    {'loss': 0.5}
    """
    found = {}
    for group, name, value, *_ in items:
        if not isinstance(name, str) or type(value) not in (int, float):
            continue
        is_own = group == _OWN_GROUP and "." in name
        if not is_own and not name.endswith((".ms", ".success", ".failure")) and name.isprintable():
            found[name[:_MOST_NAME]] = float(value)
    return found


def _to_ms(at_s: float) -> float:
    return round(at_s, 3)


class HostView:
    """Collects what a status needs while it happens. Use it on one thread: the agent's event loop.

    Args:
        host: its name.
        incarnation: of the agent.
        clock_ns: the clock of the ledger.
        wall_s: Unix seconds.
    """

    def __init__(
        self,
        host: str,
        incarnation: str,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._host, self._incarnation = host, incarnation
        self._clock_ns, self._wall_s = clock_ns, wall_s
        self._events: tuple[LoggedEvent, ...] = ()
        self._paces: dict[str, Pace] = {}
        self._values: dict[str, dict[str, float]] = {}
        self._end_steps: dict[str, int] = {}
        self._round, self._round_since_s = NO_ROUND, 0.0

    # --- what happens -------------------------------------------------------------------------------------------------

    def record(self, at_s: float, event: LedgerEvent) -> None:
        """Something has happened, at this time in Unix seconds."""
        self._events = with_event(self._events, event, _to_ms(max(0.0, at_s)), KEPT_EVENTS)
        if isinstance(event, Restore):
            self._end_steps[event.worker] = event.end_step

    def update_round(self, round_: Round) -> None:
        """The round, whenever it has changed."""
        if not self._round_since_s or (round_.number, round_.state) != (self._round.number, self._round.state):
            self._round_since_s = self._wall_s()
        self._round = round_

    def published(self, local_rank: int | None, items: Sequence[Sequence[Any]]) -> None:
        """A worker has published (group, name, value) items; None: without the launcher, there is one place."""
        values = self._values.setdefault("p" if local_rank is None else str(local_rank), {})
        for name, value in published_values(items).items():
            if not math.isfinite(value):  # the last one that was finite would look like the present one
                values.pop(name, None)
            elif name in values or len(values) < MOST_VALUES:
                values[name] = value
            elif name == "loss":  # it is shown at more places than others
                values.popitem()
                values[name] = value

    def ended(self, local_rank: int | None) -> None:
        """The process in that place is gone: what it has published is forgotten."""
        self._values.pop("p" if local_rank is None else str(local_rank), None)

    def furthest(self, book: HostLedger) -> Progress:
        """How far the workers of this host came, those that have ended too."""
        step = max((life.tally.step for life in book.lives.values()), default=-1)
        return Progress(step=step, end_step=max(self._end_steps.values(), default=-1))

    # --- the status -------------------------------------------------------------------------------------------------

    def lines(self, most: int = KEPT_EVENTS) -> tuple[EventLine, ...]:
        """The newest events, oldest first: more of them than etcd gets; see `event_lines.newest`."""
        return tuple(one.line(self._host) for one in newest(self._events, most, lambda one: one.event.kind))

    def status(
        self,
        book: HostLedger,
        every_s: float = 1.0,
        *,
        pids: Mapping[str, int] | None = None,
        places: int = 0,
        journal: str = "",
        address: str = "",
        is_etcd_away: bool = False,
    ) -> HostStatus:
        """The status now. Call it every second or so, wanted or not: the pace is measured between calls.

        Args:
            book: with what the workers have counted by now.
            every_s: the next one is written so long after this one.
            pids: of the workers' processes, by worker.
            places: how many workers the host is to have; 0: not known.
            journal: as in `HostStatus`.
            address: as in `HostStatus`.
            is_etcd_away: as in `HostStatus`.
        """
        now_ns, at_s = self._clock_ns(), self._wall_s()
        alive = [life for life in book.lives.values() if life.ended_ns is None]
        self._paces = {
            life.worker: self._paces.get(life.worker, Pace()).after(life.tally.since_ns, life.tally.step)
            for life in alive
        }

        def since_s(at_ns: int) -> float:
            return _to_ms(max(0.0, at_s - (now_ns - at_ns) / 1e9))

        has_round, first_ns = bool(self._round_since_s), book.counts.first_ns
        return HostStatus(
            host=self._host,
            incarnation=self._incarnation,
            at_s=_to_ms(at_s),
            began_s=0.0 if first_ns is None else since_s(first_ns),
            every_s=every_s,
            round=self._round.number if has_round else -1,
            round_state=self._round.state.value if has_round else "",
            round_since_s=_to_ms(self._round_since_s),
            version=__version__,
            workers=tuple(
                self._worker(life, now_ns, (pids or {}).get(life.worker, 0), since_s(life.started_ns)) for life in alive
            ),
            seen=seen_of(book, now_ns, places),
            events=self.lines(MOST_EVENTS),
            journal=journal,
            address=address,
            is_etcd_away=is_etcd_away,
        )

    def _worker(self, life: WorkerLifetime, now_ns: int, pid: int, began_s: float) -> WorkerStatus:
        tally, (place, restarts) = life.tally, parts_of(life.worker)
        is_in = tally.round == self._round.number or not self._round_since_s
        return WorkerStatus(
            worker=life.worker,
            host=self._host,
            pid=pid,
            rank=tally.rank if is_in else -1,
            round=tally.round,
            step=tally.step,
            end_step=self._end_steps.get(life.worker, -1),
            steps_per_s=0.0 if self._round.is_over else round(self._paces[life.worker].steps_per_s(now_ns), 4),
            account=tally.account.label,
            amounts=life.amounts(now_ns),
            restarts=restarts,
            began_s=began_s,
            values=self._values.get(place, {}),
        )
