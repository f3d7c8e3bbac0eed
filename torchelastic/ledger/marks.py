"""How much productive time a worker had at which step, so that it can be said later what going back to one has cost."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

#: Above this many, older ones go: of a day, one every eight minutes is left, and the newest minutes in full.
MOST_MARKS = 256
_NEWEST = 64


@dataclass(frozen=True)
class Marks:
    """A line through (step, productive nanoseconds), both growing; bounded in length.

    Attributes:
        points: by step.
    """

    points: tuple[tuple[int, int], ...] = ()

    @property
    def last_step(self) -> int:
        """The newest step; -1: there is none."""
        return self.points[-1][0] if self.points else -1

    def with_mark(self, step: int, productive_ns: int) -> Marks:
        """One more point. Of a step before the last one nothing is noted; the last one's time is the newest said."""
        if step < max(self.last_step, 0):
            return self
        points = self.points[:-1] if step == self.last_step else self.points
        if points and productive_ns < points[-1][1]:
            return self
        return Marks(_thinned((*points, (step, productive_ns))))

    def productive_ns_at(self, step: int) -> int:
        """What was productive when that step was reached; between two marks, on the line between them.

        >>> Marks(((100, 0), (200, 5_000))).productive_ns_at(150)
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

    def back_to(self, step: int) -> Marks:
        """The line up to that step."""
        kept = tuple(point for point in self.points if point[0] < step)
        return Marks((*kept, (step, self.productive_ns_at(step)))) if self.points else self


def _thinned(points: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if len(points) <= MOST_MARKS:
        return points
    # of the older ones the one goes whose neighbours are closest to each other, so that the line stays even
    places = range(1, len(points) - _NEWEST)
    dropped = min(places, key=lambda place: points[place + 1][0] - points[place - 1][0])
    return points[:dropped] + points[dropped + 1 :]
