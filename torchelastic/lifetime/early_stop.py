"""What `torchelastic.train` is told about deadlines, and how it ends when it stops because of one."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number, whole_number
from torchelastic.lifetime.bounds import needed_samples
from torchelastic.lifetime.deadline import Deadline, nearest
from torchelastic.lifetime.requeue import STOPPED_EARLY


@dataclass(frozen=True)
class Lifetime:
    """How `torchelastic.train(..., lifetime=)` meets deadlines; "auto" is `Lifetime()`.

    Args:
        reserve_s: seconds to keep besides what a step and a save take at most, for what nobody measures: the end of
            processes, the launcher, the file system's moods.
        confidence: that the save is done in time, above 0 and below 1.
        deadline: when this process has to end; None: the nearest of `sources.detect()`.
        max_restarts: a SLURM job that was started again so often is not requeued any more.
        unknown_save_s: how long a save is taken to need while none was measured; None: by the tier, as
            `decision.guess_save_s` has it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """

    reserve_s: float = 5.0
    confidence: float = 0.99
    deadline: Deadline | None = None
    max_restarts: int = 100
    unknown_save_s: float | None = None

    def __post_init__(self) -> None:
        real_number("reserve_s", self.reserve_s, remedy="give seconds, 0 or more")
        if self.unknown_save_s is not None:
            real_number("unknown_save_s", self.unknown_save_s, remedy="give seconds, 0 or more")
        whole_number("max_restarts", self.max_restarts, at_least=0, remedy="give a number, 0 or more")
        needed_samples(self.confidence)  # complains if there is no such confidence
        nearest([self.deadline])  # complains if it is none


def lifetime_of(given: object) -> Lifetime:
    """What the argument `lifetime` of `train` means. Raises TypeError for anything but "auto" and a `Lifetime`."""
    if given == "auto":
        return Lifetime()
    if not isinstance(given, Lifetime):
        raise TypeError(f'lifetime is {given!r}: give "auto", a torchelastic.lifetime.Lifetime, or None')
    return given


class StoppedEarly(SystemExit):
    """`torchelastic.train` stops before a deadline; a script that does not catch it ends with code `STOPPED_EARLY`.

    Raised on every rank that stops. Catch it to do something before the end (`finally` runs too), and raise it again: a
    run that has stopped early is not finished.

    Attributes:
        step: committed steps of the run; the next start goes on with the one after them.
        saved_in: the tiers in which that step is durable; empty if there is no checkpoint manager, or others go on.
        others_go_on: whether only this worker has left, and the others train on.
        because: one sentence.
    """

    def __init__(self, because: str, *, step: int, saved_in: tuple[str, ...] = (), others_go_on: bool = False) -> None:
        super().__init__(STOPPED_EARLY)
        self.because, self.step, self.saved_in, self.others_go_on = because, step, saved_in, others_go_on

    def __str__(self) -> str:
        return self.because
