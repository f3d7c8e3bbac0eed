"""Failures of saves: none of them ends a run, so each is remembered and counted, and its reason is said once."""

from __future__ import annotations

import logging
import re
from collections import deque

from torchelastic.checkpoint.errors import CheckpointError, NotPublishedError, OutOfStepError
from torchelastic.errors import UnsavableError
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: How many failures are remembered.
MAX_FAILURES = 20

#: Numbers and ids, which differ from save to save where the reason is the same.
_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9a-f]*[0-9][0-9a-f]*")


class Failures(deque[str]):
    """The latest failures of a manager's saves, oldest first, in words; from any thread.

    Each is counted in the metric `checkpoint.failed`. The log has one line for a reason, and then one for its tenth,
    hundredth .. time, until a save has succeeded in that place.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_FAILURES)
        self._times: dict[str, dict[str, int]] = {}

    def add(self, what: str, error: BaseException, *, place: str = "", then: str = "") -> None:
        """Something has failed; training goes on.

        Args:
            what: has failed.
            error: with its traceback, which is logged where the error is none of this library's own.
            place: the tier it was in; "": none, or all of them.
            then: what follows `what` in the log; "": that it has failed, and training goes on.
        """
        self.append(f"{what}: {cause_text(error)}")
        publish_metric("torchelastic", "checkpoint.failed", 1)
        self.say(what, error, place=place, then=then)

    def say(self, what: str, error: BaseException, *, place: str = "", then: str = "") -> None:
        """The log's part of `add`: nothing has failed yet, and it will for this reason."""
        times = self._count(error, place)
        if not is_power_of_ten(times):
            return
        is_of_others = isinstance(error, (NotPublishedError, OutOfStepError))
        then = then or (" is not published" if is_of_others else " failed; training goes on")
        says_all = isinstance(error, (CheckpointError, UnsavableError))
        log.log(
            logging.WARNING if is_of_others else logging.ERROR,
            "%s%s: %s%s",
            what,
            then,
            error if says_all else f"{type(error).__name__}: {cause_text(error)}",
            "" if times == 1 else f" ({times} times by now)",
            exc_info=None if says_all or times > 1 else error,
        )

    def succeeded(self, place: str = "") -> None:
        """A save has succeeded there: what fails next is news."""
        self._times.pop(place, None)

    def _count(self, error: BaseException, place: str) -> int:
        """How many times something has failed there for the same reason."""
        reasons = self._times.setdefault(place, {})
        reason = reason_of(error)
        if reason not in reasons and len(reasons) >= MAX_FAILURES:
            reasons.clear()
        reasons[reason] = reasons.get(reason, 0) + 1
        return reasons[reason]


def reason_of(error: BaseException) -> str:
    """The same text for errors that differ in a step, a path's number or an address alone. Pure.

    >>> reason_of(OSError("cannot write /x/step-3")), reason_of(TypeError("'a' is a date"))
    ('cannot write /x/step-#', "'a' is a date")
    """
    return _NUMBERS.sub("#", cause_text(error) or type(error).__name__)


def is_power_of_ten(number: int) -> bool:
    """Whether it is 1, 10, 100 or so on.

    >>> [number for number in range(200) if is_power_of_ten(number)]
    [1, 10, 100]
    """
    return str(number).rstrip("0") == "1"


def is_of_save(error: BaseException) -> bool:
    """Whether what a save has raised is its failure, and not the end of the process (Ctrl-C, `sys.exit`)."""
    if isinstance(error, Exception):
        return True
    kinds = type(error).__mro__  # `torch.distributed.checkpoint` has an error of its own, which is no `Exception`
    return any(kind.__module__.startswith("torch.distributed.checkpoint") for kind in kinds)


def cause_text(error: BaseException) -> str:
    """What went wrong, without the stacks of all ranks that the error of torch's DCP has in its text."""
    failures = getattr(error, "failures", None)
    if isinstance(error, Exception) or not isinstance(failures, dict):
        return str(error)
    return "; ".join(f"rank {rank}: {type(one).__name__}: {one}" for rank, (one, _) in failures.items()) or str(error)
