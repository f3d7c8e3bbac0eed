"""How one call ended on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallOutcome:
    """How the work of a call ended here.

    Attributes:
        reason: why it failed, in one line; empty if it is done.
        error: the exception that it raised, if one was raised and could be had.
        duration_s: how long the work took, in seconds; 0 if that is not known.
    """

    reason: str = ""
    error: BaseException | None = None
    duration_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the work is not done, and never will be."""
        return bool(self.reason)


def failure_of(error: BaseException, duration_s: float = 0.0) -> CallOutcome:
    """The outcome of work that raised `error`."""
    return CallOutcome(describe(error), error, duration_s)


def describe(error: BaseException) -> str:
    """The type and the text of an exception, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
