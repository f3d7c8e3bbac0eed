"""How fast a worker steps, from what is seen of it now and then: right for steps of milliseconds and of minutes."""

from __future__ import annotations

from dataclasses import dataclass

#: The rate is that of so long a time, or of the last step where steps take longer.
WINDOW_NS = 5_000_000_000


@dataclass(frozen=True)
class Pace:
    """A worker's newest steps. A value.

    Attributes:
        points: (when, step), oldest first; one for each look at which the step was another one.
    """

    points: tuple[tuple[int, int], ...] = ()

    def after(self, at_ns: int, step: int) -> Pace:
        """Once the worker has been seen at `step` since `at_ns`, in nanoseconds. A step that goes back begins anew."""
        if step < 0:
            return Pace()
        if self.points and step == self.points[-1][1]:
            return self
        if self.points and (step < self.points[-1][1] or at_ns <= self.points[-1][0]):
            return Pace(((at_ns, step),))
        points = (*self.points, (at_ns, step))
        fresh = [point for point in points if point[0] >= at_ns - WINDOW_NS]
        return Pace(tuple(fresh) if len(fresh) > 1 else points[-2:])

    def steps_per_s(self, now_ns: int) -> float:
        """Steps per second; from a step that takes longer than those before it on, it falls towards 0."""
        if len(self.points) < 2:
            return 0.0
        (first_ns, first), (last_ns, last) = self.points[0], self.points[-1]
        step_ns = (last_ns - first_ns) / (last - first)
        # looks come once in a while: a stall is told from a look that has not come yet by its length
        late_ns = max(0.0, now_ns - last_ns - max(2 * step_ns, 2e9))
        return 1e9 / (step_ns + late_ns)
