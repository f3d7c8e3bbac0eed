"""One worker from the start of its process to its end: what it counted, and what was learned later. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from torchelastic.observe.ledger.accounts import Account, Amounts, plus
from torchelastic.observe.ledger.counters import Counters, is_later
from torchelastic.observe.ledger.ledger_events import Counted, End, Restore, Save

#: Above this many, older ones go: of a day, one every eight minutes is left, and the newest minutes in full.
MOST_POINTS = 256
_NEWEST = 64


@dataclass(frozen=True)
class ProgressCurve:
    """A line through (step, productive nanoseconds), both growing; bounded in length.

    Attributes:
        points: by step.
    """

    points: tuple[tuple[int, int], ...] = ()

    @property
    def last_step(self) -> int:
        """The newest step; -1: there is none."""
        return self.points[-1][0] if self.points else -1

    def with_point(self, step: int, productive_ns: int) -> ProgressCurve:
        """One more point. A step before the last one is ignored; of the last one the newest time is kept."""
        if step < max(self.last_step, 0):
            return self
        points = self.points[:-1] if step == self.last_step else self.points
        if points and productive_ns < points[-1][1]:
            return self
        return ProgressCurve(_thinned((*points, (step, productive_ns))))

    def productive_ns_at(self, step: int) -> int:
        """What was productive when that step was reached; between two points, on the line between them.

        >>> ProgressCurve(((100, 0), (200, 5_000))).productive_ns_at(150)
        2500
        """
        place = bisect_right(self.points, (step, 2**63))
        if place == 0:
            return self.points[0][1] if self.points else 0
        low_step, low_ns = self.points[place - 1]
        if place == len(self.points) or step == low_step:
            return low_ns
        high_step, high_ns = self.points[place]
        return low_ns + (high_ns - low_ns) * (step - low_step) // (high_step - low_step)

    def back_to(self, step: int) -> ProgressCurve:
        """The line up to that step."""
        kept = tuple(point for point in self.points if point[0] < step)
        return ProgressCurve((*kept, (step, self.productive_ns_at(step)))) if self.points else self


def _thinned(points: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if len(points) <= MOST_POINTS:
        return points
    # of the older ones the one goes whose neighbours are closest to each other, so that the line stays even
    places = range(1, len(points) - _NEWEST)
    dropped = min(places, key=lambda place: points[place + 1][0] - points[place - 1][0])
    return points[:dropped] + points[dropped + 1 :]


@dataclass(frozen=True)
class WorkerLifetime:
    """See the module's docstring. A value: every method returns a new one.

    Attributes:
        worker: unique in the run.
        started_ns: when its process began, as the host knows it; never later than as the worker knows it.
        tally: what it has counted.
        marks: productive time by step, what was lost later taken off.
        lost_ns: productive time of steps that were lost after they had been committed: it is replayed time.
        detected_ns: replayed time in which the failure had happened and was not noticed yet: it is time to detect.
        level_ns: when it last received the state of a group.
        ended_ns: when its process ended; None: it runs.
        exit_code: as subprocess has it; None: it runs, or that is not known.
        cause: why it ended.
    """

    worker: str
    started_ns: int
    tally: Counters
    marks: ProgressCurve = field(default_factory=ProgressCurve)
    lost_ns: int = 0
    detected_ns: int = 0
    level_ns: int = 0
    ended_ns: int | None = None
    exit_code: int | None = None
    cause: str = ""

    @staticmethod
    def begun(worker: str, started_ns: int) -> WorkerLifetime:
        """Of a process that has begun."""
        return WorkerLifetime(worker, started_ns, Counters.begun(started_ns))

    def wall_ns(self, now_ns: int) -> int:
        """How long it has lasted."""
        return self.until_ns(now_ns) - self.started_ns

    def until_ns(self, now_ns: int) -> int:
        """Its end, or now; never before the last that is known of it."""
        return max(now_ns, self.tally.since_ns) if self.ended_ns is None else self.ended_ns

    def amounts(self, now_ns: int) -> Amounts:
        """Its time by account, which sums to `wall_ns` exactly; none is negative."""
        counted = plus(
            self.tally.amounts(self.until_ns(now_ns)), Account.START_UP, self.tally.started_ns - self.started_ns
        )
        # what was learned later may be of time that this tally, being older, has not counted yet
        lost_ns = min(self.lost_ns, counted[Account.PRODUCTIVE])
        amounts = plus(plus(counted, Account.PRODUCTIVE, -lost_ns), Account.REPLAYED, lost_ns)
        detected_ns = min(self.detected_ns, amounts[Account.REPLAYED])
        return plus(plus(amounts, Account.REPLAYED, -detected_ns), Account.DETECT, detected_ns)

    # --- what is learned ----------------------------------------------------------------------------------------------

    def began(self, at_ns: int) -> WorkerLifetime:
        """The host knows when the process began. Nothing changes where that is later than what the worker says."""
        return replace(self, started_ns=min(at_ns, self.started_ns)) if self.ended_ns is None else self

    def counted(self, event: Counted) -> WorkerLifetime:
        """The worker has counted more. What is older than what is known is left out."""
        tally = event.tally
        if self.ended_ns is not None or (tally.started_ns == self.tally.started_ns and not is_later(tally, self.tally)):
            return self
        if tally.started_ns != self.tally.started_ns and self.tally.since_ns != self.tally.started_ns:
            return self  # two that claim to be one: the first is kept
        marks = self.marks.with_point(tally.step, self._kept_ns(tally.totals[Account.PRODUCTIVE]))
        return replace(self, started_ns=min(self.started_ns, tally.started_ns), tally=tally, marks=marks)

    def ends(self, event: End) -> WorkerLifetime:
        """The process is gone."""
        if self.ended_ns is not None:
            return self
        tally = self.tally.ended(event.at_ns)
        return replace(
            self, tally=tally, ended_ns=tally.since_ns, exit_code=event.exit_code, cause=event.cause or self.cause
        )

    def restored(self, event: Restore) -> WorkerLifetime:
        """It received the state of a group: where that is older than its own, the steps in between are lost."""
        kept_ns = self._kept_ns(event.productive_ns)
        noted = replace(self, marks=self.marks.with_point(event.from_step, kept_ns), level_ns=event.at_ns)
        back = noted.goes_back_to(event.step)
        return replace(back, marks=back.marks.with_point(event.step, back._kept_ns(event.productive_ns)))

    def saved(self, event: Save) -> WorkerLifetime:
        """A checkpoint was taken: what was productive by then is known in case the group goes back to it."""
        if self.ended_ns is not None or event.productive_ns < 0:
            return self
        return replace(self, marks=self.marks.with_point(event.step, self._kept_ns(event.productive_ns)))

    def goes_back_to(self, step: int) -> WorkerLifetime:
        """Whatever it has done beyond that step is lost. A negative step is not known: nothing is."""
        if not 0 <= step < self.marks.last_step:
            return self
        lost_ns = self.marks.productive_ns_at(self.marks.last_step) - self.marks.productive_ns_at(step)
        return replace(self, marks=self.marks.back_to(step), lost_ns=self.lost_ns + lost_ns)

    def _kept_ns(self, productive_ns: int) -> int:
        return max(0, productive_ns - self.lost_ns)
