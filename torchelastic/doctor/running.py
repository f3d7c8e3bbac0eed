"""Runs checks side by side, each with a time limit: one that hangs becomes a finding, and holds nobody up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchelastic.doctor.findings import Finding, Level

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        name: what its findings are called.
        look: gathers facts and judges them; may block, on a thread of its own.
        timeout_s: after which it is given up.
        late: how bad it is if it has not ended by then.
        why_late: what most likely held it up.
        remedy: what to do then.
    """

    name: str
    look: Callable[[], Sequence[Finding]]
    timeout_s: float = 8.0
    late: Level = Level.ERROR
    why_late: str = "something that it asks does not answer"
    remedy: str = "see what the host is busy with, and run it again"


@dataclass(frozen=True)
class Ended(Generic[T]):
    """How a function ended: with a value, or with an error.

    Attributes:
        value: what it returned; None if it failed.
        error: what it raised; None if it did not.
    """

    value: T | None = None
    error: Exception | None = None


def side_by_side(
    functions: Mapping[str, Callable[[], T]],
    timeouts_s: Mapping[str, float],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Ended[T]]:
    """Call each on a daemon thread; those that have not ended in time are left behind and are not in the result.

    A thread that hangs in a system call cannot be ended; as a daemon it does not keep the process alive.

    Args:
        functions: by name.
        timeouts_s: the limit of each, in seconds from now.
        clock: monotonic seconds.
    """
    answers: queue.SimpleQueue[tuple[str, Ended[T]]] = queue.SimpleQueue()

    def call(name: str, function: Callable[[], T]) -> None:
        try:
            ended = Ended(value=function())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            ended = Ended(error=error)
        answers.put((name, ended))

    began_s = clock()
    for name, function in functions.items():
        threading.Thread(target=call, args=(name, function), name=f"doctor-{name}", daemon=True).start()
    done: dict[str, Ended[T]] = {}
    while pending := functions.keys() - done.keys():
        left_s = began_s + max(timeouts_s[name] for name in pending) - clock()
        try:
            name, ended = answers.get(timeout=max(0.0, left_s))
        except queue.Empty:
            break
        done[name] = ended
    return done


def run_checks(checks: Sequence[Check], *, clock: Callable[[], float] = time.monotonic) -> list[Finding]:
    """The findings of all checks, in the order of the checks; takes no longer than the longest of their limits."""
    looks = {str(index): check.look for index, check in enumerate(checks)}
    timeouts_s = {str(index): check.timeout_s for index, check in enumerate(checks)}
    ended = side_by_side(looks, timeouts_s, clock=clock)
    found: list[Finding] = []
    for index, check in enumerate(checks):
        found += _of(check, ended.get(str(index)))
    return found


def _of(check: Check, ended: Ended[Sequence[Finding]] | None) -> Sequence[Finding]:
    if ended is None:
        what = f"no answer within {check.timeout_s:g} s: given up"
        return [Finding(check.name, check.late, what, check.why_late, check.remedy)]
    if ended.error is not None:
        error = ended.error
        remedy = "report it with this line (it is a fault of the doctor, not of this host), and look by hand"
        what = "this could not be looked at"
        return [Finding(check.name, Level.WARNING, what, f"{type(error).__name__}: {error}", remedy)]
    return ended.value or []
