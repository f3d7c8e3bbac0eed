"""Whether weights and optimizers are copied before each step: measured, and decided once. Pure, but for its clock.

A copy undoes whatever a step does. Without one a step is undone by a rule ("commit"): before the optimizer no weight
has changed, after it the step counts. That rests on a property of the user's code: that nothing but the optimizer
changes weights. So copies are made where they are cheap; else the first steps are watched for changes by other means.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchelastic.text import bytes_text

#: Steps before the first that is measured: they allocate, and make the optimizer's state.
WARM_UP_STEPS = 2
MEASURED_STEPS = 8
#: A copy is cheap if it takes this part of a step, or ..
CHEAP_PART = 0.03
#: .. if it takes this long.
CHEAP_S = 500e-6
#: A copy may take this part of the memory that is free.
MEMORY_PART = 0.25


class Undo(enum.Enum):
    """How the weights are undone."""

    TRIAL = "copied, while it is measured what that costs"
    COPIES = "copied before each step"
    RULE = "not copied"

    @property
    def copies(self) -> bool:
        """Whether the weights are copied before each step."""
        return self is not Undo.RULE


@dataclass(frozen=True)
class UndoChoice:
    """What was decided.

    Attributes:
        undo: how.
        why: for the log.
    """

    undo: Undo
    why: str = ""


def choose(copy_s: Sequence[float], step_s: Sequence[float]) -> UndoChoice:
    """Whether copies are cheap. Pure.

    Args:
        copy_s: how long each copy has taken.
        step_s: how long each step has taken, without its copy.

    >>> choose([0.001] * 10, [0.1] * 10).undo, choose([0.01] * 10, [0.1] * 10).undo
    (<Undo.COPIES: 'copied before each step'>, <Undo.RULE: 'not copied'>)
    >>> choose([0.01] * 9, [0.1] * 9).undo
    <Undo.TRIAL: 'copied, while it is measured what that costs'>
    """
    if len(copy_s) < WARM_UP_STEPS + MEASURED_STEPS:
        return UndoChoice(Undo.TRIAL)
    copy, step = (statistics.median(each[WARM_UP_STEPS:]) for each in (copy_s, step_s))
    if copy <= max(CHEAP_S, CHEAP_PART * step):
        return UndoChoice(Undo.COPIES)
    return UndoChoice(Undo.RULE, f"a copy takes {1000 * copy:.3g} ms, and a step {1000 * step:.3g} ms")


def why_too_large(needed_bytes: int, free_bytes: int) -> str | None:
    """What to say where copies would take too much of the memory; None: they do not. Pure.

    >>> why_too_large(10**9, 10**10), why_too_large(10**9, 2 * 10**9)
    (None, 'a copy takes 954 MiB, and 1.86 GiB of memory are free')
    """
    if needed_bytes <= MEMORY_PART * free_bytes:
        return None
    return f"a copy takes {bytes_text(needed_bytes)}, and {bytes_text(free_bytes)} of memory are free"


class Trial:
    """Measures copies and steps until it is decided. On the training thread.

    Args:
        clock: seconds; never goes back.
        free_bytes: how much memory is free where the weights are.
    """

    def __init__(self, clock: Callable[[], float], free_bytes: Callable[[], int]) -> None:
        self._clock, self._free_bytes = clock, free_bytes
        self._copy_s: list[float] = []
        self._step_s: list[float] = []
        self._began_s = self._copied_s = 0.0
        self._bytes = 0

    def why_no_room(self, needed_bytes: int) -> str | None:
        """See `why_too_large`; measured where more is needed than before."""
        if needed_bytes <= self._bytes:
            return None
        grown_bytes, self._bytes = needed_bytes - self._bytes, needed_bytes
        return why_too_large(grown_bytes, self._free_bytes())

    def copy_begins(self) -> None:
        """A copy is about to be made."""
        self._began_s = self._clock()

    def copy_ends(self) -> None:
        """It was made."""
        self._copied_s = self._clock()

    def step_ends(self) -> UndoChoice:
        """A step has succeeded."""
        self._copy_s.append(self._copied_s - self._began_s)
        self._step_s.append(self._clock() - self._copied_s)
        return choose(self._copy_s, self._step_s)
