"""Failures in a row, without a committed step between them: which are the same again, and when to stop trying. Pure.

A failure that comes again in the same place with the same words, but for times, addresses, paths and other numbers, is
deterministic: another attempt in the same process costs a rendezvous and ends like the one before. What the loss of a
peer or of a whole group looks like says nothing of that kind: it is repeated for as long as others fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from torchelastic.error_text import without_particulars
from torchelastic.errors import ComputeCheckError, NonRetryableException, RetryableException, UnfitError
from torchelastic.join_rules import Reshaped
from torchelastic.rendezvous.loss import is_of_group

#: So often the same failure is seen before it counts as deterministic.
SAME_FAILURES = 3

#: Packages whose frames are not the user's.
_NOT_THE_USERS = ("torchelastic", "torch")
#: Errors of an accelerator that a new process may be free of: a corrupted context, memory held by earlier attempts.
_OF_DEVICE = ("AcceleratorError", "OutOfMemoryError")


@dataclass(frozen=True)
class Fingerprint:
    """What makes one failure the same as another.

    Attributes:
        kind: the error's type.
        message: its text, without what may differ each time.
        file: of the innermost frame in the user's code; of the innermost one of all where none is the user's.
        line: of that frame.
    """

    kind: str
    message: str
    file: str
    line: int


class RepeatedFailures:
    """Counts the failures of one worker since its last committed step. Use it on the training thread."""

    def __init__(self) -> None:
        self.count = 0
        self.last_error: BaseException | None = None
        self._seen: Counter[Fingerprint] = Counter()
        self._groups: set[tuple[Fingerprint | None, Reshaped | None]] = set()

    def committed(self) -> None:
        """A step has succeeded: what comes from here on begins anew."""
        if self.count or self._groups:
            self._forget()
            self._groups.clear()

    def _forget(self) -> None:
        self.count, self.last_error = 0, None
        self._seen.clear()

    def failed(self, error: BaseException, *, in_user_code: bool) -> int:
        """Count one more.

        Args:
            error: with its traceback.
            in_user_code: whether a step or a hook of the state failed, and not the forming of a group.

        Returns:
            How often this same failure was seen; 0: it is of a kind that is not recognized.
        """
        self.count += 1
        self.last_error = error
        mark = fingerprint(error) if in_user_code else None
        if mark is None:
            return 0
        self._seen[mark] += 1
        return self._seen[mark]

    def came_in(self, error: BaseException, group: Reshaped | None) -> None:
        """The step comes again in a group of another kind: attempts in that one are counted anew."""
        self._forget()
        self._groups.add((fingerprint(error), group))

    def seen_in(self, error: BaseException) -> frozenset[Reshaped]:
        """In which kinds of groups the same failure came, as `came_in` was told."""
        mark = fingerprint(error)
        return frozenset(group for other, group in self._groups if other == mark and group is not None)


def fingerprint(error: BaseException) -> Fingerprint | None:
    """What another failure has to share to be the same.

    None: the error may be another's fault (it speaks of the group or of a peer), the user has asked to try it again
    (`RetryableException`), or it was never raised.
    """
    if isinstance(error, RetryableException) or is_of_group(error):
        return None
    if error.__traceback__ is None:
        return None
    place = _innermost(error.__traceback__, _is_of_user) or _innermost(error.__traceback__, lambda _: True)
    assert place is not None
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return Fingerprint(kind, without_particulars(str(error)), *place)


def new_process_may_help(error: BaseException) -> bool:
    """Whether the same failure need not come again in another process: it is the accelerator's, or not of the script.

    Where no line of the user's code has raised it, it may be of the group's members or of this host.
    """
    if _innermost(error.__traceback__, _is_of_user) is None:
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_OF_DEVICE) or "CUDA error" in str(error)


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help, here or in a new process: the user's own code has said so, or such an error.

    Any other that torchelastic has raised is about this group: a new process may be in another one.
    """
    if isinstance(error, (UnfitError, ComputeCheckError)):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return isinstance(error, NonRetryableException) and traceback is not None and _is_of_user(traceback)


def _is_of_user(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS


def _innermost(traceback: TracebackType | None, counts: Callable[[TracebackType], bool]) -> tuple[str, int] | None:
    place = None
    while traceback is not None:
        if counts(traceback):
            place = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place
