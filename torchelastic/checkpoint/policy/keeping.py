"""Which checkpoints to keep: the mirror image of when to save.

A policy is a value: it is given what there is, and says of each checkpoint whether to keep it and why. It deletes
nothing.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torchelastic.checkpoint.policy.arguments import FrozenMapping, real_number, text, whole_number
from torchelastic.checkpoint.policy.composition import Combination, Composable, combined


@dataclass(frozen=True)
class KeptCheckpoint:
    """A complete checkpoint that is there; subclass it to carry more, such as its path.

    Args:
        step: committed steps of the run, at that time.
        saved_s: when it was saved, in seconds of wall time.
        metrics: what was measured of it, by name; may come later than the checkpoint.
        size_bytes: how large it is; 0: not known.
        pinned: whether somebody has said that it must stay.
    """

    step: int
    saved_s: float
    metrics: Mapping[str, float] = field(default=FrozenMapping[float]())
    size_bytes: int = 0
    pinned: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", FrozenMapping(self.metrics))


Checkpoint = TypeVar("Checkpoint", bound=KeptCheckpoint)


@dataclass(frozen=True)
class KeepDecision:
    """What a policy says of one checkpoint. It is as true as `keep` is.

    Attributes:
        keep: whether it stays.
        because: a few words for the log.
    """

    keep: bool
    because: str

    def __bool__(self) -> bool:
        return self.keep

    def __str__(self) -> str:
        return f"{'keep' if self.keep else 'delete'}: {self.because}"


class KeepPolicy(Composable, ABC):
    """Says which checkpoints stay. `a | b` keeps what one of them wants, `a & b` what both want.

    Whatever the policy, two things stay: the newest checkpoint, and those that are pinned. Your own policy is a
    subclass with the method `wanted`, and need not care for that.
    """

    @abstractmethod
    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """Why this policy wants each of the checkpoints, in a few words; None: it does not.

        Args:
            checkpoints: oldest first; at least one.
        """

    def decide(self, checkpoints: Sequence[KeptCheckpoint]) -> list[KeepDecision]:
        """Says of each checkpoint whether it stays, and why; in the same order.

        Args:
            checkpoints: all that are complete, oldest first (in the order in which they were saved, not by step: a run
                that went back to an older checkpoint repeats steps).

        Raises:
            ValueError: they are given newest first, or the policy did not answer for each of them.
        """
        if not checkpoints:
            return []
        _check_oldest_first(checkpoints)
        reasons = list(self.wanted(checkpoints))
        if len(reasons) != len(checkpoints):
            raise ValueError(f"{self!r} gave {len(reasons)} answers for {len(checkpoints)} checkpoints: one for each")
        # by place and by time: if these differ, a clock was set back, and neither may go
        newest = {len(checkpoints) - 1, max(range(len(checkpoints)), key=lambda place: checkpoints[place].saved_s)}
        decisions = []
        for place, (checkpoint, reason) in enumerate(zip(checkpoints, reasons, strict=True)):
            if reason is None and place in newest:
                reason = "the newest"
            elif reason is None and checkpoint.pinned:
                reason = "pinned"
            because = f"not wanted by {self!r}" if reason is None else reason
            decisions.append(KeepDecision(reason is not None, because))
        return decisions

    def kept(self, checkpoints: Sequence[KeptCheckpoint]) -> list[bool]:
        """Whether each checkpoint stays; arguments and errors as for `decide`."""
        return [decision.keep for decision in self.decide(checkpoints)]

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return combined(KeepIfAny, self, other)

    def __and__(self, other: KeepPolicy) -> KeepPolicy:
        return combined(KeepIfAll, self, other)


def rising_s(times_s: Iterable[float]) -> list[float]:
    """Times of a clock, oldest save first, so that each is after the one before.

    Policies go by the order of the saves: a clock that was set back counts as one that was set forward by as much. So
    times go on from there, also where all that was saved by the wrong clock is one checkpoint.

    >>> rising_s([1.0, 5.0, 3.0, 3.5])
    [1.0, 5.0, 7.0, 7.5]
    >>> rising_s([1.0, 1.0]) == [1.0, math.nextafter(1.0, math.inf)]
    True
    """
    given_s = list(times_s)
    passed_s = (abs(now_s - before_s) for before_s, now_s in itertools.pairwise(given_s))
    rising = itertools.chain(given_s[:1], passed_s)
    return list(itertools.accumulate(rising, lambda at_s, more_s: max(at_s + more_s, math.nextafter(at_s, math.inf))))


def prunable(policy: KeepPolicy, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """What may be deleted, oldest first; never the newest and never a pinned one.

    Args:
        policy: says what stays.
        checkpoints: all that are complete, oldest first.

    Raises:
        ValueError: they are given newest first.

    >>> there = [KeptCheckpoint(step, saved_s=60.0 * step) for step in (100, 200, 300)]
    >>> [checkpoint.step for checkpoint in prunable(KeepLast(2), there)]
    [100]
    """
    decisions = policy.decide(checkpoints)
    return [checkpoint for checkpoint, decision in zip(checkpoints, decisions, strict=True) if not decision.keep]


def _last_of_each_step(checkpoints: Sequence[KeptCheckpoint]) -> list[int]:
    """The places of those that were not saved again, oldest first.

    A step is saved again where a run has gone back, or is stopped right after a save: what counts is the last save.

    >>> _last_of_each_step([KeptCheckpoint(step, 0.0) for step in (10, 20, 30, 20)])
    [0, 2, 3]
    """
    return sorted({checkpoint.step: place for place, checkpoint in enumerate(checkpoints)}.values())


@dataclass(frozen=True)
class KeepAll(KeepPolicy):
    """Keeps everything."""

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """All."""
        return ["all are kept"] * len(checkpoints)


@dataclass(frozen=True)
class KeepLast(KeepPolicy):
    """Keeps the n newest steps, of each the save that was made last. Ignores times and metrics.

    Args:
        n: how many; at least 1.

    Raises:
        TypeError: n is no whole number.
        ValueError: n is below 1.
    """

    n: int

    def __post_init__(self) -> None:
        whole_number("n", self.n, at_least=1, remedy="give how many of the newest to keep, 1 or more")

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """The last n that were not saved again."""
        newest = set(_last_of_each_step(checkpoints)[-self.n :])
        return [f"one of the {self.n} newest" if place in newest else None for place in range(len(checkpoints))]


@dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Keeps, of each n steps of the run, the first checkpoint: at n, 2n, 3n, ... or at the first step after that.

    So it also works where saves do not fall on multiples. Of a step that was saved again (after the run had gone back)
    it is the last save. Ignores times and metrics.

    Args:
        n_steps: at least 1.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1.
    """

    n_steps: int

    def __post_init__(self) -> None:
        whole_number("n_steps", self.n_steps, at_least=1, remedy="give the steps between two that are kept, 1 or more")

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """The first step at or after each multiple."""
        first: dict[int, int] = {}
        for checkpoint in checkpoints:
            first.setdefault(checkpoint.step // self.n_steps, checkpoint.step)
        last = set(_last_of_each_step(checkpoints))
        reasons: list[str | None] = []
        for place, checkpoint in enumerate(checkpoints):
            multiple = checkpoint.step // self.n_steps
            is_first = first[multiple] == checkpoint.step and (multiple > 0 or checkpoint.step == 0)
            reasons.append(f"the first from step {multiple * self.n_steps} on" if is_first and place in last else None)
        return reasons


@dataclass(frozen=True)
class KeepEverySeconds(KeepPolicy):
    """Keeps the oldest, and then each that was saved at least so long after the one kept before.

    Ignores steps and metrics.

    Args:
        seconds: of wall time; above 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, infinite or NaN.
    """

    seconds: float

    def __post_init__(self) -> None:
        real_number("seconds", self.seconds, above=0.0, remedy="give the seconds between two that are kept, above 0")

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """The oldest, and each far enough from the one before, also where the clock was set back."""
        last_s: float | None = None
        reasons: list[str | None] = []
        for checkpoint in checkpoints:
            far = last_s is None or abs(checkpoint.saved_s - last_s) >= self.seconds
            reasons.append(f"the first of {self.seconds:.4g} s" if far else None)
            last_s = checkpoint.saved_s if far else last_s
        return reasons


@dataclass(frozen=True)
class KeepBest(KeepPolicy):
    """Keeps the n steps whose metric is best, of each the last save with it; of equal ones the newer. Ignores times.

    A checkpoint without the metric, or with NaN, is not among the best. If *none* has it while some have other metrics,
    the name is probably wrong: these all stay, and the reason says so.

    Args:
        metric: its name in `KeptCheckpoint.metrics`.
        n: how many; at least 1.
        mode: "min": the smallest is best; "max": the largest.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: the metric has no name, n is below 1, or the mode is another one.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        text("metric", self.metric, "name the metric, for example 'loss'")
        whole_number("n", self.n, at_least=1, remedy="give how many of the best to keep, 1 or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}: give 'min' (the smallest is best) or 'max'")

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """The best n, or all that have other metrics if none has this one."""
        sign = 1.0 if self.mode == "min" else -1.0
        if not any(self.metric in checkpoint.metrics for checkpoint in checkpoints):
            reason = f"there is no metric {self.metric!r} to compare, only others"
            return [reason if checkpoint.metrics else None for checkpoint in checkpoints]
        values = [sign * checkpoint.metrics.get(self.metric, math.nan) for checkpoint in checkpoints]
        rated = [place for place, value in enumerate(values) if not math.isnan(value)]
        rated = [rated[one] for one in _last_of_each_step([checkpoints[place] for place in rated])]
        best = sorted(rated, key=lambda place: (values[place], -place))[: self.n]
        reasons: list[str | None] = [None] * len(checkpoints)
        for rank, place in enumerate(best, start=1):
            value = checkpoints[place].metrics[self.metric]
            reasons[place] = f"number {rank} by {self.mode} {self.metric} ({value:.4g})"
        return reasons


@dataclass(frozen=True, repr=False)
class KeepCombination(Combination[KeepPolicy], KeepPolicy):
    """Several policies for keeping in one.

    Args:
        policies: the members, at least one.

    Raises:
        TypeError: a member is no KeepPolicy.
        ValueError: there are none.
    """

    policies: tuple[KeepPolicy, ...]
    _member = KeepPolicy

    def wanted(self, checkpoints: Sequence[KeptCheckpoint]) -> Sequence[str | None]:
        """Ask every member."""
        answers = zip(*(policy.wanted(checkpoints) for policy in self.policies), strict=True)
        return [
            "; ".join(reason for reason in reasons if reason is not None)
            if type(self)._holds_of(reason is not None for reason in reasons)
            else None
            for reasons in answers
        ]


class KeepIfAny(KeepCombination):
    """Keeps what at least one of its members wants: what `a | b` gives."""

    _holds_of = any


class KeepIfAll(KeepCombination):
    """Keeps what all of its members want: what `a & b` gives."""

    _holds_of = all


def _check_oldest_first(checkpoints: Sequence[KeptCheckpoint]) -> None:
    """A list that goes back in steps and in time throughout is the wrong way round: nothing must be deleted by it."""
    pairs = list(itertools.pairwise(checkpoints))
    if pairs and all(left.step > right.step and left.saved_s > right.saved_s for left, right in pairs):
        raise ValueError("the checkpoints are given newest first: give them oldest first, for example reversed(...)")
