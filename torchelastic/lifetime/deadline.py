"""When this process has to end: what a deadline is, and those in environment variables; the others are in `sources`.

A date becomes monotonic time at the moment it is read, so that later jumps of the host's clock change nothing.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torchelastic.checkpoint.policy.arguments import real_number

log = logging.getLogger(__name__)

#: Set by the ML platform of ByteDance; velastic's and verl's users fill it by hand too.
MLP_VARIABLE = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
#: The same of Amazon SageMaker's training plans.
SAGEMAKER_VARIABLE = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
#: SageMaker begins to terminate instances so long before the capacity ends (AWS documentation on training plans).
SAGEMAKER_LEAD_S = 30 * 60.0
#: Unix seconds at which this instance ends.
TERMINATION_TIME_VARIABLE = "TORCHELASTIC_TERMINATION_TIME"
#: The variables with a date: what ends then, and how long before it the platform begins to terminate.
_VARIABLES = {
    MLP_VARIABLE: ("capacity block", 0.0),
    SAGEMAKER_VARIABLE: ("capacity block", SAGEMAKER_LEAD_S),
    TERMINATION_TIME_VARIABLE: ("elastic instance", 0.0),
}
#: Unix seconds beyond this are milliseconds: it is the year 5138.
_MILLISECONDS_FROM = 1e11


@runtime_checkable
class Deadline(Protocol):
    """A source that knows when this process has to end. Sampled on the training thread, every second or so.

    Attributes:
        name: of the source, for people: "SLURM", "time limit".
        reason: where it is known from, one short phrase.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - see above

    @property
    def reason(self) -> str: ...  # noqa: D102

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds until then; negative if it is over; None while none is known. May change both ways.

        Must not block: a source that polls a server does so on a thread of its own. `now_s` is in monotonic seconds, by
        the clock that the deadline was made with.
        """


@dataclass(frozen=True)
class DeadlineAt:
    """A deadline at a fixed moment: `at_s`, in monotonic seconds. `name` and `reason` as in `Deadline`."""

    name: str
    at_s: float
    reason: str

    def remaining_s(self, now_s: float) -> float | None:
        """See `Deadline`."""
        return self.at_s - now_s


def deadline_in_variable(
    name: str, variable: str, value: str, *, now_s: float, wall_s: float, lead_s: float = 0.0
) -> DeadlineAt | None:
    """The deadline in a variable; None if it is not set, or, with a warning, if it is over: it is an earlier one's.

    Args:
        name: of what ends.
        variable: its name.
        value: its text.
        now_s: the present moment in monotonic seconds.
        wall_s: the same moment in Unix seconds.
        lead_s: how long before the end the platform begins to terminate. If that moment is over, but the end is not,
            the end counts, with a warning.

    Raises:
        ValueError: the value is no date in Unix seconds.
    """
    if not value.strip():
        return None
    remedy = "set it to Unix seconds (`date +%s` prints those of now), or unset it"
    left_s = unix_seconds(f"{variable} is", value, remedy) - wall_s
    if left_s <= 0.0:
        text = "%s=%s is %.0f s in the past: ignored. Unset it, or set it to the end of the present block"
        log.warning(text, variable, value, -left_s)
        return None
    if left_s <= lead_s:
        text = "%s=%s: the platform may terminate from %.0f s before it, which is over; counting on the end itself"
        log.warning(text, variable, value, lead_s)
        lead_s = 0.0
    reason = f"{variable}={value}" + (f", less {lead_s:.0f} s" if lead_s else "")
    return DeadlineAt(name, now_s + left_s - lead_s, reason)


def time_limit_s(seconds: float, *, began_s: float) -> DeadlineAt:
    """A limit that the user has set on the time of this process.

    Args:
        seconds: how long it may take, above 0.
        began_s: when that began, in monotonic seconds; usually `time.monotonic()` at the start of the program.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, infinite or NaN.

    >>> time_limit_s(3600, began_s=100.0).remaining_s(now_s=160.0)
    3540.0
    """
    limit_s = real_number("time_limit_s", seconds, above=0.0, remedy="give the seconds this process may take")
    return DeadlineAt("time limit", began_s + limit_s, f"time_limit_s={limit_s:g}")


@dataclass(frozen=True)
class Nearest:
    """Several deadlines, of which the nearest counts, whichever it is at the time; without any there is none."""

    deadlines: tuple[Deadline, ...] = ()

    @property
    def name(self) -> str:
        """The names of all."""
        return ", ".join(deadline.name for deadline in self.deadlines) or "none"

    @property
    def reason(self) -> str:
        """The reasons of all."""
        return "; ".join(deadline.reason for deadline in self.deadlines) or "no deadline was found"

    def remaining_s(self, now_s: float) -> float | None:
        """See `Deadline`."""
        known = (deadline.remaining_s(now_s) for deadline in self.deadlines)
        return min((left_s for left_s in known if left_s is not None), default=None)

    def unsure_since_s(self) -> float | None:
        """See the function of that name."""
        known = (unsure_since_s(deadline) for deadline in self.deadlines)
        return max((since_s for since_s in known if since_s is not None), default=None)

    def which(self, now_s: float) -> Deadline | None:
        """The nearest; the first, if several are equally near; None if none is known."""
        known = [(deadline.remaining_s(now_s), deadline) for deadline in self.deadlines]
        near = [(left_s, deadline) for left_s, deadline in known if left_s is not None]
        if not near:
            return None
        _, nearest_one = min(near, key=lambda pair: pair[0])
        return nearest_one.which(now_s) if isinstance(nearest_one, Nearest) else nearest_one


def unsure_since_s(deadline: Deadline) -> float | None:
    """Monotonic seconds of the newest notice that does not say how much time is left; None: there is none.

    A deadline that may have one has a method of that name; `remaining_s` is then a guess, and it is right to save at
    once. Call `remaining_s` before: a signal is only read there.
    """
    method: Callable[[], float | None] | None = getattr(deadline, "unsure_since_s", None)
    return None if method is None else method()


def nearest(deadlines: Iterable[Deadline | None]) -> Nearest:
    """One deadline from several; None among them counts as none.

    Raises:
        TypeError: something else is among them.
    """
    given = tuple(deadline for deadline in deadlines if deadline is not None)
    for deadline in given:
        if not isinstance(deadline, Deadline):
            raise TypeError(f"{deadline!r} is no deadline: it needs `name`, `reason` and `remaining_s(now_s)`")
    return Nearest(given)


def automatic_deadlines(
    environment: Mapping[str, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> list[Deadline]:
    """The deadlines in environment variables; default: those of this process. See `detect` for all.

    Args:
        environment: variables.
        clock: monotonic seconds; the same that the deadlines are sampled with.
        wall_clock: Unix seconds.

    Raises:
        ValueError: a variable holds something that is no date; names it.
    """
    variables = os.environ if environment is None else environment
    now_s, wall_s = clock(), wall_clock()
    found = [
        deadline_in_variable(name, one, variables.get(one, ""), now_s=now_s, wall_s=wall_s, lead_s=lead_s)
        for one, (name, lead_s) in _VARIABLES.items()
    ]
    return [deadline for deadline in found if deadline is not None]


def unix_seconds(what: str, text: str, remedy: str) -> float:
    """A date in Unix seconds. Raises ValueError: it is none; begins with `what` ("X is"), ends with the `remedy`."""
    shown = f"{what} {text[:60]!r}, which"
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{shown} is no number: {remedy}") from None
    if not math.isfinite(seconds) or seconds < 0.0:
        raise ValueError(f"{shown} is no date: {remedy}")
    if seconds >= _MILLISECONDS_FROM:
        raise ValueError(f"{shown} looks like milliseconds: {remedy}")
    return seconds
