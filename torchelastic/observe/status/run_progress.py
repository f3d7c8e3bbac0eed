"""How far a run is, how fast it goes and how long it still takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.text import age_text

#: The rate is that of so long a time, or of the last step where steps take longer.
WINDOW_NS = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training is. A value.

    Attributes:
        step: committed steps; -1: not known.
        end_step: steps of the whole run; -1: not known.
        steps_per_s: see `Pace`; 0: not known yet.
        loss: as the script has published it; None: it has not.
    """

    step: int = -1
    end_step: int = -1
    steps_per_s: float = 0.0
    loss: float | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the run at this rate; None: not known."""
        if self.steps_per_s <= 0 or self.step < 0 or self.end_step < 0:
            return None
        return max(0, self.end_step - self.step) / self.steps_per_s

    def parts(self) -> list[str]:
        """What is known, each in some words: step, rate, loss, time left.

        >>> Progress(step=120, end_step=600, steps_per_s=4.0, loss=0.25).parts()
        ['step 120 of 600 (20 %)', '4 steps/s', 'loss 0.25', 'about 2.0 min left']
        """
        if self.step < 0:
            return []
        share = f" of {self.end_step} ({100 * self.step // self.end_step} %)" if self.end_step >= self.step > 0 else ""
        found = [f"step {self.step}{share}"]
        if self.steps_per_s:
            found.append(f"{rate_text(self.steps_per_s)} steps/s")
        if self.loss is not None:
            found.append(f"loss {self.loss:.4g}")
        if self.left_s:
            found.append(f"about {age_text(self.left_s)} left")
        return found


def rate_text(steps_per_s: float) -> str:
    """Steps per second with three digits.

    >>> rate_text(0.0123), rate_text(48.25), rate_text(0.0)
    ('0.0123', '48.2', '0')
    """
    return f"{steps_per_s:.3g}" if steps_per_s < 100 else f"{steps_per_s:.0f}"


@dataclass(frozen=True)
class Pace:
    """How fast a worker steps, from samples of it: right for steps of milliseconds and of minutes. A value.

    Attributes:
        points: (when, step), oldest first; one for each sample at which the step had changed.
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
        # samples come once in a while: only a gap that is too long for that is a stall
        late_ns = max(0.0, now_ns - last_ns - max(2 * step_ns, 2e9))
        return 1e9 / (step_ns + late_ns)
