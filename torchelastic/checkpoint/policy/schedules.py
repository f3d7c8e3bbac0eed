"""The plain save policies: by steps, by time, on request, never."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number, whole_number
from torchelastic.checkpoint.policy.saving import SaveDecision, SaveMoment, SavePolicy


def due_in_s(moment: SaveMoment, period_s: float) -> float:
    """Seconds until a period since the last save is over; 0: it is.

    A clock that was set back by less than the period makes it that much longer; if by more, a save is due at once,
    which sets a new reference. So a wrong clock neither stops the saves nor causes one after each step.
    """
    return 0.0 if abs(moment.since_s) >= period_s else period_s - moment.since_s


def shown_s(seconds: float) -> str:
    """Seconds as one reads them."""
    return f"{seconds:.3g} s" if seconds < 1000.0 else f"{seconds:.0f} s"


def running(moment: SaveMoment) -> str:
    """How a reason to save ends while an earlier save is not done yet."""
    return ", while the previous save is still running" if moment.saving else ""


def already_saved(moment: SaveMoment) -> SaveDecision:
    """What every policy says of a step whose save has begun."""
    return SaveDecision(False, f"step {moment.step} is saved already")


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Saves at the steps offset, offset + n, offset + 2n, ... of the run.

    A step that was missed (the previous save was still running) is made up for after the next one. Ignores time, costs
    and failures.

    Args:
        n: steps from save to save.
        offset: of the steps to save at; below n.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: n is below 1, or the offset is not from 0 to n - 1.

    >>> policy = EverySteps(100)
    >>> str(policy.decide(SaveMoment(200, now_s=50.0, last_saved_step=100, last_saved_s=25.0, began_s=0.0)))
    'save: step 200 is due (every 100 steps)'
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        n = whole_number("n", self.n, at_least=1, remedy="give the steps from save to save, 1 or more (or use Never())")
        offset = whole_number("offset", self.offset, at_least=0, remedy="give 0 or more, and less than n")
        if offset >= n:
            raise ValueError(f"offset is {offset}: give 0 or more, and less than n={n}")

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if one of the steps has come since the last save."""
        if moment.is_saved:
            return already_saved(moment)
        newest = moment.step - (moment.step - self.offset) % self.n
        # a restored run may stand before its last save: then only the steps themselves count
        since = moment.since_step if moment.since_step < moment.step else moment.step - 1
        numbers = {"due_in_steps": 0.0 if newest > since else float(newest + self.n - moment.step)}
        if newest <= since:
            return SaveDecision(False, f"the next is step {newest + self.n} (every {self.n} steps)", numbers)
        return SaveDecision(True, f"step {newest} is due (every {self.n} steps){running(moment)}", numbers)


@dataclass(frozen=True)
class AtSteps(SavePolicy):
    """Saves at these steps of the run, and at no others; one that was missed is made up for. Ignores all but steps.

    Args:
        steps: any order, each 0 or more.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: there are none, or one is negative.
    """

    steps: tuple[int, ...]

    def __init__(self, steps: Iterable[int]) -> None:
        remedy = "give steps of 0 or more"
        given = {whole_number("steps", step, at_least=0, remedy=remedy) for step in steps}
        if not given:
            raise ValueError("steps is empty: give at least one step, or use Never()")
        object.__setattr__(self, "steps", tuple(sorted(given)))

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if one of the steps has come since the last save."""
        if moment.is_saved:
            return already_saved(moment)
        passed = bisect.bisect_right(self.steps, moment.step)
        since = moment.since_step if moment.since_step < moment.step else moment.step - 1
        if passed and self.steps[passed - 1] > since:
            return SaveDecision(True, f"step {self.steps[passed - 1]} is one of those to save at{running(moment)}")
        if passed == len(self.steps):
            return SaveDecision(False, f"step {moment.step} is past the last of those to save at")
        due_in = {"due_in_steps": float(self.steps[passed] - moment.step)}
        return SaveDecision(False, f"the next step to save at is {self.steps[passed]}", due_in)


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Saves when this time has passed since the last save began. Ignores steps, costs and failures.

    Args:
        seconds: from the beginning of a save to the beginning of the next; above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, infinite or NaN.
    """

    seconds: float

    def __post_init__(self) -> None:
        remedy = "give the seconds from save to save, above 0 (or use Never())"
        real_number("seconds", self.seconds, above=0.0, remedy=remedy)

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if the last save began at least so long ago."""
        if moment.is_saved:
            return already_saved(moment)
        left_s = due_in_s(moment, self.seconds)
        numbers = {"due_in_s": left_s}
        if left_s > 0.0:
            return SaveDecision(False, f"due in {shown_s(left_s)} (every {shown_s(self.seconds)})", numbers)
        if moment.since_s < 0.0:
            return SaveDecision(True, f"the clock went back by {shown_s(-moment.since_s)}{running(moment)}", numbers)
        since = "the last save" if moment.last_saved_s is not None else "training began"
        because = f"{shown_s(moment.since_s)} since {since} (every {shown_s(self.seconds)}){running(moment)}"
        return SaveDecision(True, because, numbers)


@dataclass(frozen=True)
class OnSignal(SavePolicy):
    """Saves when this worker was asked to leave, unless this very step is saved. Ignores everything else.

    It knows of no deadline: whether a save fits into the time that is left is decided elsewhere. While the request
    stands, every further step is to be saved, since each might be the last.
    """

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if a stop is requested."""
        if not moment.stop_requested:
            return SaveDecision(False, "nobody asked this worker to leave")
        if moment.is_saved:
            return already_saved(moment)
        return SaveDecision(True, f"this worker was asked to leave{running(moment)}")


@dataclass(frozen=True)
class OnEnd(SavePolicy):
    """Saves what a run has trained last, when it ends, unless this very step is saved. Ignores everything else."""

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Due if no step follows."""
        if not moment.run_ends:
            return SaveDecision(False, "the run goes on")
        return already_saved(moment) if moment.is_saved else SaveDecision(True, f"the run ends{running(moment)}")


@dataclass(frozen=True)
class Never(SavePolicy):
    """Saves at no time: `Never() | p` is p, and `Never() & p` never saves."""

    def decide(self, moment: SaveMoment) -> SaveDecision:  # noqa: ARG002 - a policy's signature
        """Not due."""
        return SaveDecision(False, "the policy is never to save")
