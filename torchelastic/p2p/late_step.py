"""The samples of one step that is late: where its thread stays, when it last worked, and what was done about it."""

from __future__ import annotations

import math

from torchelastic.p2p.hangs import Act, ThreadSample, has_worked, unchanged_since_s


class LateStep:
    """A step that is late, as its samples show it.

    Args:
        began_s: when it began, which tells it from every other one.

    Attributes:
        began_s: see above.
        works: whether the thread has worked between the last two samples.
    """

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.works = False
        self._last: ThreadSample | None = None
        self._unchanged_since_s: float | None = None
        self._worked_s: float | None = None
        self._done = Act.NOTHING
        self._has_guessed = False

    def add(self, sample: ThreadSample) -> None:
        """Take in the newest sample."""
        self._unchanged_since_s = unchanged_since_s(self._unchanged_since_s, self._last, sample)
        self.works = has_worked(self._last, sample)
        if self.works:
            self._worked_s = sample.at_s
        self._last = sample

    def unchanged_s(self, at_s: float) -> float:
        """For how long the thread has waited at the point of the newest sample."""
        return 0.0 if self._unchanged_since_s is None else at_s - self._unchanged_since_s

    def idle_s(self, at_s: float) -> float:
        """For how long it has not worked; infinite: it has not been seen at work in this step."""
        return math.inf if self._worked_s is None else at_s - self._worked_s

    def is_first_guess(self) -> bool:
        """Whether nothing was said of it before; from now on something is."""
        is_first, self._has_guessed = not self._has_guessed, True
        return is_first

    def goes_further(self, act: Act) -> bool:
        """Whether that is more than what was done about this step so far; from now on it is done."""
        if act.value <= self._done.value:
            return False
        self._done = act
        return True
