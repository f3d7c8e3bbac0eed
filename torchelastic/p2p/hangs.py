"""When a step that does not end is taken for a hang, and what is done then: pure decisions.

A guess, never a fact: the bound adapts to what steps have taken so far, and an alarm that proves false widens it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

#: The first steps of a round are not measured and have the whole time-out: they compile, and warm up.
WARM_UP_STEPS = 2
#: Fraction of the bound for which a worker must have been at one point of a collective: one that makes slow progress
#: from collective to collective (an evaluation) does not hang.
STALL_SHARE = 0.5
#: Interval of the samples of a worker, as a fraction of the bound.
SAMPLE_FRACTION = 0.25
#: Who uses more than this share of a processor computes and does not wait.
MAX_WAITING_CPU = 0.2
#: Of collectives, in milliseconds, where the user has not chosen one (0.1's); one that was chosen is never exceeded.
DEFAULT_TIMEOUT_MS = 10000
#: Where the time-out of collectives ends a step while a rank works, that rank is waited for at least so long.
MIN_BUSY_PATIENCE_S = 60.0
#: A time-out that has proved too short does not grow beyond this: torch's own default.
MAX_LEARNED_TIMEOUT_S = 1800.0
#: A sign of work needs two samples and a beat to reach another rank.
MIN_IDLE_S = 2.0


@dataclass(frozen=True)
class HangPolicy:
    """How long a step may take before its worker is suspected to hang.

    Args:
        factor: so many times the slowest step of the run so far.
        floor_s: at least so many seconds.
        end_after_s: end this worker's process, so that its agent starts it again, if it has been in user code for so
            many seconds of one step (and longer than the bound); None: never, it is only reported.

    Raises:
        ValueError: an argument out of its range.

    >>> policy = HangPolicy(factor=10.0, floor_s=3.0)
    >>> policy.bound_s(0.1, timeout_s=60.0), policy.bound_s(2.0, timeout_s=60.0), policy.bound_s(2.0, timeout_s=10.0)
    (3.0, 20.0, 10.0)
    >>> policy.bound_s(None, timeout_s=60.0)
    60.0
    """

    factor: float = 10.0
    floor_s: float = 3.0
    end_after_s: float | None = None

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ValueError(f"factor={self.factor}: a step may take at least as long as the slowest one so far (1.0)")
        if not self.floor_s > 0.0:
            raise ValueError(f"floor_s={self.floor_s} must be above 0")
        if self.end_after_s is not None and not self.end_after_s > 0.0:
            raise ValueError(f"end_after_s={self.end_after_s} must be above 0, or None")

    def bound_s(self, slowest_step_s: float | None, timeout_s: float) -> float:
        """The bound after the slowest step so far took `slowest_step_s` (None: none is known); at most the time-out."""
        if slowest_step_s is None:
            return timeout_s
        return min(timeout_s, max(self.floor_s, self.factor * slowest_step_s))

    def longer_timeout_s(self, timeout_s: float) -> float:
        """The time-out of collectives that nobody has chosen, after one of `timeout_s` has ended a step at work.

        >>> [HangPolicy().longer_timeout_s(timeout_s) for timeout_s in (10.0, 600.0, 3600.0)]
        [100.0, 1800.0, 3600.0]
        """
        return max(timeout_s, min(MAX_LEARNED_TIMEOUT_S, self.factor * timeout_s))


class Place(enum.Enum):
    """The location of the training thread: in a collective (or a backward pass, which waits for one), or not."""

    COLLECTIVE = "collective"
    USER_CODE = "user code"


@dataclass(frozen=True)
class ThreadSample:
    """One sample of a worker's training thread.

    Attributes:
        at_s: when, on a monotonic clock.
        place: see `Place`.
        point: the exact instruction of each of its frames.
        cpu_s: processor time that the thread has used so far.
        io_bytes: how much it has read and written so far.
        queued_s: for how long it has been ready to compute, while others had the processors.
        may_spin: whether its process uses a GPU, for which a thread waits with a busy processor.
    """

    at_s: float
    place: Place
    point: tuple[object, ...]
    cpu_s: float
    io_bytes: int = 0
    queued_s: float = 0.0
    may_spin: bool = False


def unchanged_since_s(earlier_s: float | None, earlier: ThreadSample | None, later: ThreadSample) -> float:
    """Since when the thread has waited at the point where `later` saw it.

    Args:
        earlier_s: the result for the sample before.
        earlier: the sample before; None: there was none in this step.
        later: the newest sample.
    """
    if earlier is None or earlier_s is None or earlier.point != later.point:
        return later.at_s
    computed_s = 0.0 if later.may_spin else later.cpu_s - earlier.cpu_s
    return earlier_s if computed_s <= MAX_WAITING_CPU * (later.at_s - earlier.at_s) else later.at_s


def has_worked(earlier: ThreadSample | None, later: ThreadSample) -> bool:
    """Whether the thread has worked between two samples: its stack has changed, or it has computed, read or written.

    In a collective a changed stack means nothing: waiting may be done in a loop. On a host that does too much at once,
    a thread of the user's that waits for its turn works too.

    Args:
        earlier: the sample before; None: there was none in this step.
        later: the newest sample.
    """
    if earlier is None:
        return False
    is_users = earlier.place is later.place is Place.USER_CODE
    has_moved = is_users and earlier.point != later.point
    wanted_s = later.cpu_s - earlier.cpu_s + (later.queued_s - earlier.queued_s if is_users else 0.0)
    computed_s = 0.0 if later.may_spin else wanted_s
    has_computed = computed_s > MAX_WAITING_CPU * (later.at_s - earlier.at_s)
    return has_moved or has_computed or later.io_bytes > earlier.io_bytes


def idle_bound_s(bound_s: float) -> float:
    """For how long nobody may have been seen at work before a step beyond its bound is taken for a hang.

    Whoever is late begins to ask after `SAMPLE_FRACTION` of the bound: where nobody works, this costs no time.
    """
    return max(MIN_IDLE_S, (1.0 - SAMPLE_FRACTION) * bound_s)


class Act(enum.Enum):
    """What a watchdog does.

    Nothing; say for whom it waits; write the stacks to the log; cut the group's connections; end the process.
    """

    NOTHING = 0
    WAIT = 1
    REPORT = 2
    CUT = 3
    END = 4


@dataclass(frozen=True)
class Suspicion:
    """What a watchdog knows of a step that has not ended.

    Attributes:
        step_s: for how long this worker has been in it.
        unchanged_s: for how long it has waited at one point.
        place: where.
        bound_s: by `HangPolicy.bound_s`.
        timeout_s: of collectives.
        is_warm: the round's first steps are over, and there is a measurement.
        idle_s: for how long nobody is known to have worked: of the others if this worker waits in a collective, else
            this worker itself.
        times_out_itself: whether a collective ends after `timeout_s` by itself, as gloo's do. NCCL's are ended here.
    """

    step_s: float
    unchanged_s: float
    place: Place
    bound_s: float
    timeout_s: float
    is_warm: bool
    idle_s: float = math.inf
    times_out_itself: bool = True

    @property
    def is_excused(self) -> bool:
        """Whether the step is beyond its bound because somebody works.

        That is no hang before the time-out, which in a collective comes by itself.
        """
        is_in_time = self.step_s < self.timeout_s or self.place is Place.COLLECTIVE
        return is_in_time and self.step_s >= self.bound_s and self.idle_s < idle_bound_s(self.bound_s)

    @property
    def has_timed_out(self) -> bool:
        """Whether a collective that does not time out by itself has taken as long as one may."""
        is_waiting = self.place is Place.COLLECTIVE and not self.times_out_itself
        return is_waiting and self.unchanged_s >= self.timeout_s

    def act(self, policy: HangPolicy) -> Act:
        """What to do.

        A worker that waits in a collective cuts its group. It leaves that to the collective's own time-out where the
        bound is no shorter: that one begins with the collective, not with the step. Where there is none, it cuts after
        so long at one point. One in user code cuts nothing: those who wait for it decide, and if nobody waits, nobody
        is harmed. Neither takes work for a hang before the time-out.
        """
        if self.place is Place.COLLECTIVE:
            if self.has_timed_out:
                return Act.CUT
            is_adaptive = self.is_warm and self.bound_s < self.timeout_s
            has_hung = self.step_s >= self.bound_s and self.unchanged_s >= STALL_SHARE * self.bound_s
            if not (is_adaptive and has_hung):
                return Act.NOTHING
            return Act.WAIT if self.is_excused else Act.CUT
        report_after_s = self.bound_s if self.is_warm else policy.factor * self.timeout_s
        if self.step_s < report_after_s:
            return Act.NOTHING
        if policy.end_after_s is not None and self.step_s >= policy.end_after_s:
            return Act.END
        return Act.NOTHING if self.is_excused else Act.REPORT
