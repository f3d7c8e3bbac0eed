"""How long iterations take: what is usual, what is slow, and what the next ones will take.

The first iterations (warm-up, compilation) are set apart, and only the newest count. What is usual is a median, which
slow iterations do not move. Pauses, such as an evaluation, are outliers; if they come at equal distances, the next one
is predicted. Pure: no clock in here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.checkpoint.policy.costs import Bound, upper_bound

#: The first iterations of a process, or of a new group, that are set apart; and those that may compile.
WARM_UP, COMPILING = 1, 3
#: How many of the newest iterations count.
WINDOW = 1024
#: How many times the usual iteration makes a pause, and how many standard deviations above the usual one.
_PAUSE_FACTOR, _PAUSE_DEVIATIONS = 3.0, 8.0
#: The standard deviation of a normal distribution in units of its median absolute deviation.
_DEVIATION_OF_MAD = 1.4826
#: How many pauses at equal distances make a rhythm.
_RHYTHM = 3
#: How many pauses without anything between them are no pauses any more.
_SLOWER = 2


def step_bound(durations_s: Sequence[float], confidence: float = 0.99, *, what: str = "steps") -> Bound | None:
    """How much time to leave for one more step before a given moment; None without any sample.

    A loop that goes on as long as at least b seconds are left overruns the moment only if the step that covers the
    moment b seconds before takes longer than b more. The rest of that step is not distributed as the steps are, but
    with the density P(step > y) / mean: the residual life of a renewal process. So b is the smallest for which all
    steps together spent at most a fraction 1 - confidence of their time beyond their first b seconds; and not less than
    `upper_bound`, for steps of equal length.

    Source: D. R. Cox, "Renewal theory" (1962), section 5.2. The fraction is that of the sample: an estimate, where
    `upper_bound` is a theorem.

    Args:
        durations_s: how long the steps took, in any order.
        confidence: above 0 and below 1.
        what: the durations, for the reason.

    Raises:
        ValueError: as `upper_bound`.

    >>> step_bound([1.0] * 199, 0.99).seconds
    1.0
    >>> step_bound([1.0] * 198 + [41.0], 0.99).seconds > 38.0  # a sixth of all moments fall into the long one
    True
    """
    alone = upper_bound(durations_s, confidence, what=what)
    if alone is None or not alone.is_assured:
        return alone
    residual_s = _residual(sorted(durations_s), 1.0 - confidence)
    if residual_s <= alone.seconds:
        return alone
    because = (
        f"{what} spent at most {1.0 - confidence:.2g} of their time beyond it, in {alone.samples} {what}: a moment is "
        "more likely to fall into a long one"
    )
    return Bound(residual_s, confidence, True, alone.samples, because)


def guess(seconds: float, because: str, confidence: float = 0.99) -> Bound:
    """A bound that nobody has measured. Raises ValueError if it is negative, infinite or NaN."""
    return Bound(real_number("seconds", seconds, remedy="give seconds, 0 or more"), confidence, False, 0, because)


def _residual(ordered: Sequence[float], share: float) -> float:
    """The smallest b for which the sum of (x - b) over the x above b is at most this share of the sum of all x."""
    allowed = share * math.fsum(ordered)
    longest = list(reversed(ordered))
    for count, total in enumerate(itertools.accumulate(longest), start=1):
        b = (total - allowed) / count
        following = longest[count] if count < len(longest) else 0.0
        if b >= following:
            return max(0.0, b)
    return 0.0  # pragma: no cover - the last b is below 0 by rounding alone, where the share is almost 1


@dataclass(frozen=True)
class Rhythm:
    """Pauses that come at equal distances.

    Attributes:
        every: iterations from pause to pause.
        due_in: iterations until the next one; 1: it is the next iteration.
    """

    every: int
    due_in: int


@dataclass(frozen=True)
class TimesView:
    """The iterations in the window, classified: the base of all predictions.

    Attributes:
        usual_s: the median of all of them.
        ordinary_s: those that are no pauses, oldest first.
        pauses_s: the others, oldest first.
        rhythm: of the pauses; None: none was seen.
        slower_s: the newest iterations, if several in a row are as long as pauses; else none.
    """

    usual_s: float
    ordinary_s: tuple[float, ...]
    pauses_s: tuple[float, ...]
    rhythm: Rhythm | None
    slower_s: tuple[float, ...] = ()

    def pauses_within(self, iterations: int) -> float:
        """How many pauses are expected in the next iterations: by their rhythm, or by how often they came."""
        if self.rhythm is not None:
            return float(max(0, (iterations - self.rhythm.due_in) // self.rhythm.every + 1))
        if len(self.pauses_s) < 2:
            return 0.0  # a single one says nothing of how often it happens
        return iterations * len(self.pauses_s) / (len(self.pauses_s) + len(self.ordinary_s))

    def bound(self, iterations: int, confidence: float) -> Bound | None:
        """How much time to leave for the slowest of the next so many iterations; None if nothing is known.

        Where the newest iterations are all far longer than the others, they are no pauses, but the new usual ones, and
        only they count. `confidence` is above 0 and below 1.
        """
        slower = upper_bound(self.slower_s, confidence, what="iterations since they became slower")
        bound = self._bound(iterations, confidence)
        return slower if slower is not None and bound is not None and slower.seconds > bound.seconds else bound

    def _bound(self, iterations: int, confidence: float) -> Bound | None:
        """The same by all iterations that count."""
        if self.rhythm is None:
            return step_bound((*self.ordinary_s, *self.pauses_s), confidence, what="iterations")
        ordinary = step_bound(self.ordinary_s, confidence, what="iterations between pauses")
        if self.rhythm.due_in > iterations:
            return ordinary
        pause = step_bound(self.pauses_s, confidence, what="pauses")
        known = [bound for bound in (ordinary, pause) if bound is not None]
        return max(known, key=lambda bound: bound.seconds, default=None)


class IterationTimes:
    """The iteration times of one process, of which the newest `WINDOW` count. Not for several threads.

    Args:
        warm_up: how many of the first iterations are set apart, here and after each `reset`.

    Attributes:
        count: iterations observed since the beginning, those set apart included.

    >>> times = IterationTimes(warm_up=1)
    >>> for seconds in [60.0, 1.0, 1.0, 1.0, 9.0, 1.0]:
    ...     times.observe(seconds)
    >>> times.set_apart, times.usual_s, times.longest_s
    ((60.0,), 1.0, 9.0)
    >>> times.expected_s(10)  # one pause alone is an accident
    10.0
    """

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._warm_up = warm_up
        self._set_apart: list[float] = []
        self._left_apart = self._warm_up
        self._earlier: tuple[float, ...] = ()
        self.count = 0

    def observe(self, seconds: float) -> None:
        """One more iteration took so long. Raises ValueError if that is negative, infinite or NaN."""
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds}: give the duration of an iteration by a clock that never goes back")
        self.count += 1
        if self._left_apart:
            self._left_apart -= 1
            self._set_apart.append(seconds)
        else:
            self._window.append(seconds)

    def reset(self) -> None:
        """The group has changed: earlier iterations predict nothing; the next ones warm up again."""
        self._earlier = ()
        self._window.clear()
        self._set_apart.clear()
        self._left_apart = self._warm_up

    def remember(self, earlier_s: Sequence[float]) -> None:
        """The newest iterations of earlier attempts of the job, oldest first, in seconds.

        They count for bounds and forecasts until there are enough newer ones, and not for `recent_s`. The first ones of
        this attempt, which are set apart, come between: a rhythm continues over attempts.

        Raises:
            ValueError: one is negative, infinite or NaN.
        """
        if not all(0.0 <= seconds < math.inf for seconds in earlier_s):
            raise ValueError("an iteration of an earlier attempt is negative, infinite or NaN")
        self._earlier = tuple(earlier_s)

    @property
    def known_s(self) -> tuple[float, ...]:
        """The newest iterations of all attempts that count, oldest first; for `remember` in the next one."""
        if not self._earlier:
            return tuple(self._window)
        between = [statistics.median(self._earlier)] * len(self._set_apart)
        return (*self._earlier, *between, *self._window)[-WINDOW:]

    @property
    def has_first_only(self) -> bool:
        """Whether only first iterations are known, in all attempts; they may have compiled."""
        return bool(self._set_apart) and not self.known_s

    @property
    def set_apart(self) -> tuple[float, ...]:
        """The first iterations since the beginning or the last `reset`."""
        return tuple(self._set_apart)

    @property
    def recent_s(self) -> tuple[float, ...]:
        """The iterations that count, oldest first; while there are none, those that were set apart."""
        return tuple(self._window or self._set_apart)

    @property
    def newest_s(self) -> float:
        """The newest iteration that counts; 0 if there is none."""
        return self._window[-1] if self._window else 0.0

    @property
    def usual_s(self) -> float:
        """The median of the iterations that count; 0 if there are none."""
        recent = self.recent_s
        return statistics.median(recent) if recent else 0.0

    @property
    def longest_s(self) -> float:
        """The longest of the iterations that count; 0 if there are none."""
        return max(self.recent_s, default=0.0)

    def view(self) -> TimesView | None:
        """The iterations that count, classified; while there are none, the newest of the first ones; None: neither."""
        recent = self.known_s or self.set_apart[-1:]
        if not recent:
            return None
        usual_s = statistics.median(recent)
        limit_s = _pause_limit(recent, usual_s)
        places = [place for place, seconds in enumerate(recent) if seconds > limit_s]
        return TimesView(
            usual_s=usual_s,
            ordinary_s=tuple(seconds for seconds in recent if seconds <= limit_s),
            pauses_s=tuple(recent[place] for place in places),
            rhythm=self._own_rhythm(limit_s) or _rhythm(places, len(recent)),
            slower_s=_slower(recent, limit_s),
        )

    def summary(self) -> str:
        """What was measured, in a line for people."""
        first = ", ".join(f"{seconds:.3g}" for seconds in self._set_apart) or "none"
        return f"{self.average_s():.3g} s each, the longest {self.longest_s:.3g} s, set apart at the start: {first} s"

    def _own_rhythm(self, limit_s: float) -> Rhythm | None:
        """That of this attempt, if it has one already: it need not continue that of the one before."""
        own = tuple(self._window)
        return _rhythm([place for place, seconds in enumerate(own) if seconds > limit_s], len(own))

    def average_s(self) -> float:
        """The mean of the iterations that count, without the pauses; 0 if there are none."""
        view = self.view()
        return statistics.fmean(view.ordinary_s) if view is not None else 0.0

    def expected_s(self, iterations: int) -> float:
        """What the next so many iterations take, with the pauses that are due or usual; 0 while nothing is known."""
        view = self.view()
        if view is None:
            return 0.0
        ordinary_s = statistics.fmean(view.ordinary_s)
        pause_s = statistics.median(view.pauses_s) if view.pauses_s else 0.0
        return iterations * ordinary_s + view.pauses_within(iterations) * max(0.0, pause_s - ordinary_s)


def _pause_limit(recent: tuple[float, ...], usual_s: float) -> float:
    """The limit above which an iteration is a pause: far beyond the scatter of the others."""
    scatter_s = _DEVIATION_OF_MAD * statistics.median(abs(seconds - usual_s) for seconds in recent)
    return max(_PAUSE_FACTOR * usual_s, usual_s + _PAUSE_DEVIATIONS * scatter_s)


def _slower(recent: tuple[float, ...], limit_s: float) -> tuple[float, ...]:
    """The newest ones, if several in a row are above the limit."""
    newest = tuple(itertools.takewhile(lambda seconds: seconds > limit_s, reversed(recent)))
    return newest if len(newest) >= _SLOWER else ()


def _rhythm(places: list[int], count: int) -> Rhythm | None:
    """The rhythm of pauses at these places of `count` iterations, if all of them are at equal distances.

    An unexpected or a missing one ends it: then any iteration may be a pause.
    """
    if len(places) < _RHYTHM:
        return None
    distances = {later - earlier for earlier, later in itertools.pairwise(places)}
    every = distances.pop()
    due_in = places[-1] + every - (count - 1)
    return Rhythm(every, due_in) if not distances and due_in >= 1 and every >= 2 else None
