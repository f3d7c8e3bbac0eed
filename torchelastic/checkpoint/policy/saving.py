"""When to save: what a save policy may look at, what it answers, and how several become one.

A policy is a value: it is asked after each committed step, and answers from what it is told, with no clock, no file and
no memory of its own. So every rank that is given the same answers the same; if the ranks' clocks differ, ask on one of
them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.checkpoint.policy.arguments import FrozenMapping
from torchelastic.checkpoint.policy.composition import Combination, Composable, combined
from torchelastic.checkpoint.policy.costs import SaveCosts
from torchelastic.checkpoint.policy.failure_rate import FailureRate


@dataclass(frozen=True)
class SaveMoment:
    """Everything that a save policy may look at; built after each committed step.

    With several tiers, each has its own policy and is asked with its own moment.

    Attributes:
        step: committed steps of the run so far, this one included.
        now_s: seconds by a clock that never goes back, such as `time.monotonic()`.
        last_saved_step: the step at which the newest save began, or that was restored; None: neither, in this process.
            A save that failed counts too: if not, it is due again after each step.
        last_saved_s: when that was, by the same clock.
        began_s: when this process began to train, by the same clock; counts until something is saved or restored.
        saving: whether a save is still running in the background.
        stop_requested: whether a signal, a drain or a spot notice has asked this worker to leave.
        step_s: how long a step takes, smoothed; None: not known yet.
        costs: what saves cost.
        failures: how often something fails.
        began_step: the step at which this process began to train; counts until something is saved or restored.
        run_ends: whether no step follows this one in the run. Where a policy would save then and not now, that is done
            if it turns out so.

    Raises:
        ValueError: `step` is negative, or a time is infinite or NaN.
    """

    step: int
    now_s: float
    last_saved_step: int | None
    last_saved_s: float | None
    began_s: float
    saving: bool = False
    stop_requested: bool = False
    step_s: float | None = None
    costs: SaveCosts = field(default=SaveCosts())
    failures: FailureRate = field(default=FailureRate())
    began_step: int = 0
    run_ends: bool = False

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step is {self.step}: give the number of committed steps, 0 or more")
        for name in ("now_s", "last_saved_s", "began_s", "step_s"):
            seconds = getattr(self, name)
            if seconds is not None and not math.isfinite(seconds):
                raise ValueError(f"{name} is {seconds}: give seconds by a monotonic clock")

    @property
    def is_saved(self) -> bool:
        """Whether the save of this very step has begun already."""
        return self.last_saved_step == self.step

    @property
    def since_step(self) -> int:
        """The step that steps are counted from: of the last save, or at which training began here."""
        return self.began_step if self.last_saved_step is None else self.last_saved_step

    @property
    def since_s(self) -> float:
        """Seconds since the last save began, or since training began here. Negative if the clock was set back."""
        return self.now_s - (self.began_s if self.last_saved_s is None else self.last_saved_s)


@dataclass(frozen=True)
class SaveDecision:
    """What a policy answers. It is as true as `save` is.

    Attributes:
        save: whether a save is due.
        because: one sentence for the log.
        numbers: what the answer rests on, by name with its unit; for metrics and tests. `dict(numbers)` for JSON.
        parts: the answers of the members, from a combination; in their order.
    """

    save: bool
    because: str
    numbers: Mapping[str, float] = field(default=FrozenMapping[float]())
    parts: tuple[SaveDecision, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.numbers, FrozenMapping):
            object.__setattr__(self, "numbers", FrozenMapping(self.numbers))

    def __bool__(self) -> bool:
        return self.save

    def __str__(self) -> str:
        return f"{'save' if self.save else 'no save'}: {self.because}"


class SavePolicy(Composable, ABC):
    """Decides after each committed step whether to save. `a | b` saves when one of them would, `a & b` when both would.

    Your own is a subclass, best a frozen dataclass. It must not look at anything but its arguments and the moment.

    A policy says when a save is *due*. It stays due while an earlier save is still running (`moment.saving`): whoever
    asks either waits for that one or skips this step and asks again after the next, where it is still due.
    """

    @abstractmethod
    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Whether to save now, and why. Never raises for a valid moment."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return combined(SaveIfAny, self, other)

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return combined(SaveIfAll, self, other)


@dataclass(frozen=True, repr=False)
class SaveCombination(Combination[SavePolicy], SavePolicy):
    """Several policies for saving in one.

    Where members give a number of the same name, the first that agrees with the decision has it; all are in `parts`.

    Args:
        policies: the members, at least one.

    Raises:
        TypeError: a member is no SavePolicy.
        ValueError: there are none.
    """

    policies: tuple[SavePolicy, ...]
    _member = SavePolicy

    def decide(self, moment: SaveMoment) -> SaveDecision:
        """Ask every member."""
        parts = tuple(policy.decide(moment) for policy in self.policies)
        return _joined(type(self)._holds_of(part.save for part in parts), parts)


class SaveIfAny(SaveCombination):
    """Saves when at least one of its members would: what `a | b` gives."""

    _holds_of = any


class SaveIfAll(SaveCombination):
    """Saves when all of its members would: what `a & b` gives."""

    _holds_of = all


def _joined(save: bool, parts: tuple[SaveDecision, ...]) -> SaveDecision:
    """One decision from several: the reasons are those of the members that agree with it."""
    agreeing = [part for part in parts if part.save == save]
    numbers: dict[str, float] = {}
    for part in (*agreeing, *(part for part in parts if part.save != save)):
        if part.numbers:
            numbers = {**part.numbers, **numbers}
    because = "; ".join(dict.fromkeys(part.because for part in agreeing))
    return SaveDecision(save, because, numbers, parts)
