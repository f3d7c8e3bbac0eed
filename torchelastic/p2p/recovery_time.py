"""How long a worker was kept from training by a failure, phase by phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: What happens between a failure and the next committed step, in order; each phase ends where the next begins.
PHASES = ("agree", "re_form", "sync", "step")


@dataclass(frozen=True)
class Recovery:
    """One recovery on one worker; times on the monotonic clock of its machine.

    Attributes:
        noticed_s: when this worker noticed the failure.
        phases_ms: agree (undo the step, until the next roster is known), re_form (until the process group stands), sync
            (until the state is level), step (until a step has committed).
    """

    noticed_s: float
    phases_ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        """From noticing the failure to the next committed step."""
        return sum(self.phases_ms.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {self.phases_ms[name]:.1f}" for name in PHASES)
        return f"{self.total_ms:.1f} ms from the failure to the next committed step ({phases})"


class RecoveryTimer:
    """Takes the time at the end of each phase; nothing happens unless a failure was noticed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: list[float] = []

    def noticed(self) -> None:
        """A failure was seen; further ones before the recovery is over belong to it."""
        if not self._marks:
            self._marks = [self._clock()]

    def reached(self, phase: str) -> Recovery | None:
        """A phase has ended. After another failure in between, phases are taken anew. Returns the whole at the last."""
        number = PHASES.index(phase)
        if len(self._marks) <= number:
            return None
        del self._marks[number + 1 :]
        self._marks.append(self._clock())
        if phase != PHASES[-1]:
            return None
        marks, self._marks = self._marks, []
        ends = zip(PHASES, marks, marks[1:], strict=False)
        return Recovery(marks[0], {name: 1000 * (end - begin) for name, begin, end in ends})
