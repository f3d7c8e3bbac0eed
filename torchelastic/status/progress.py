"""How far a run is, how fast it goes and how long it still takes, for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training is. A value.

    Attributes:
        step: committed steps; -1: not known.
        end_step: steps of the whole run; -1: not known.
        steps_per_s: see `torchelastic.status.pace`; 0: not known yet.
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
        ['step 120 of 600 (20 %)', '4 steps/s', 'loss 0.25', 'about 2:00 left']
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
            found.append(f"about {left_text(self.left_s)} left")
        return found


def rate_text(steps_per_s: float) -> str:
    """Steps per second with three digits.

    >>> rate_text(0.0123), rate_text(48.25), rate_text(0.0)
    ('0.0123', '48.2', '0')
    """
    return f"{steps_per_s:.3g}" if steps_per_s < 100 else f"{steps_per_s:.0f}"


def left_text(seconds: float) -> str:
    """A time to come, in minutes and seconds, hours and minutes, or days.

    >>> left_text(74.6), left_text(7265.0), left_text(200_000.0)
    ('1:15', '2 h 01 min', '2.3 days')
    """
    if seconds >= 86_400:
        return f"{seconds / 86_400:.1f} days"
    if seconds >= 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
