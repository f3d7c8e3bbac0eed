"""How long a worker was kept from training by a failure, phase by phase, and what is known of its cause."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torchelastic.metrics import publish_metric
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.rendezvous.loss import Loss

log = logging.getLogger(__name__)

#: What happens between a failure and the next committed step, in order; each phase ends where the next begins.
PHASES = ("agree", "re_form", "sync", "step")


@dataclass(frozen=True)
class Recovery:
    """One recovery on one worker; times on the monotonic clock of its machine.

    Attributes:
        noticed_s: when this worker noticed the failure.
        phases_ms: agree (undo the step, until the next roster is known), re_form (until the process group is formed),
            sync (until the state is in sync), step (until a step has committed). There is no "detect": when a process
            ended is known to its own agent only.
        cause: who was lost, as facts and guesses; empty: nobody was, as far as is known.
    """

    noticed_s: float
    phases_ms: dict[str, float]
    cause: tuple[Loss, ...] = ()

    @property
    def total_ms(self) -> float:
        """From noticing the failure to the next committed step."""
        return sum(self.phases_ms.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {self.phases_ms[name]:.1f}" for name in PHASES)
        because = "; ".join(map(str, self.cause)) or "nobody was lost"
        return f"{self.total_ms:.1f} ms from the failure to the next committed step ({phases}): {because}"


def report(recovery: Recovery) -> None:
    """Log a recovery and publish its times and its cause as metrics."""
    log.info("recovered: %s", recovery)
    publish_metric("torchelastic", "recovery.duration.ms", recovery.total_ms)
    for phase in PHASES:
        publish_metric("torchelastic", f"recovery.{phase}.duration.ms", recovery.phases_ms[phase])
    because = "; ".join(map(str, recovery.cause)) or "nobody was lost"
    this_worker().re_formed({phase: int(1e6 * recovery.phases_ms[phase]) for phase in PHASES}, because)
    for loss in recovery.cause:
        publish_metric("torchelastic", f"recovery.cause.{loss.kind}", 1.0)


class RecoveryTimer:
    """Takes the time at the end of each phase; nothing happens unless a failure was noticed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times_s: list[float] = []
        self._cause: dict[Loss, None] = {}  # in order, each once

    def noticed(self) -> None:
        """A failure was seen; further ones before the recovery is over belong to it."""
        if not self._times_s:
            self._times_s = [self._clock()]

    def because(self, losses: tuple[Loss, ...], *, was_spare: bool = False) -> None:
        """What is known about the failure that is being recovered from; of several in a row, all of it.

        Where this worker has waited as a spare, the others have recovered without it: they report what it took.
        """
        if was_spare:
            self._times_s, self._cause = [], {}
        elif self._times_s:
            self._cause.update(dict.fromkeys(losses))

    def reached(self, phase: str) -> Recovery | None:
        """A phase has ended. After another failure in between, phases are taken anew. Returns the whole at the last."""
        number = PHASES.index(phase)
        if len(self._times_s) <= number:
            return None
        del self._times_s[number + 1 :]
        self._times_s.append(self._clock())
        if phase != PHASES[-1]:
            return None
        times_s, self._times_s = self._times_s, []
        cause, self._cause = tuple(self._cause), {}
        ends = zip(PHASES, times_s, times_s[1:], strict=False)
        return Recovery(times_s[0], {name: 1000 * (end - begin) for name, begin, end in ends}, cause)
