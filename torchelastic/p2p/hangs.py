"""When a step that does not end is taken for a hang, what is done then, and what a false alarm teaches: pure decisions.

A guess, never a fact: the bound adapts to what steps have taken so far, and an alarm that proves false widens it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The first steps of a round are not measured and have the whole time-out: they compile, and warm up.
WARM_UP_STEPS = 2
#: Fraction of the bound for which a worker must have been at one point of a collective: one that makes slow progress
#: from collective to collective (an evaluation) does not hang.
STALL_SHARE = 0.5
#: Interval of the samples of a worker, as a fraction of the bound.
SAMPLE_FRACTION = 0.25
#: Who uses more than this share of a processor computes and does not wait.
MAX_WAITING_CPU = 0.2
#: What reads and writes more than so many bytes a second works; an idle service of a logger does less.
MAX_WAITING_BYTES_S = 64 * 2**10
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
        children: of each process below its own, the processor time that it has used and what it has read and written.
    """

    at_s: float
    place: Place
    point: tuple[object, ...]
    cpu_s: float
    io_bytes: int = 0
    queued_s: float = 0.0
    may_spin: bool = False
    children: Mapping[int, tuple[float, int]] = field(default_factory=dict)


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
    a thread of the user's that waits for its turn works too; so does one that waits for a process that works.

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
    has_helpers = is_users and children_work(earlier, later)
    return has_moved or has_computed or has_helpers or later.io_bytes > earlier.io_bytes


def children_work(earlier: ThreadSample, later: ThreadSample) -> bool:
    """Whether a process below the worker's has worked between two samples, by more than what a service does idly."""
    passed_s = later.at_s - earlier.at_s
    for pid, (cpu_s, io_bytes) in later.children.items():
        before_s, before_bytes = earlier.children.get(pid, (cpu_s, io_bytes))
        if cpu_s - before_s > MAX_WAITING_CPU * passed_s or io_bytes - before_bytes > MAX_WAITING_BYTES_S * passed_s:
            return True
    return False


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
        has_not_worked: this worker has not been seen at work in this step.
    """

    step_s: float
    unchanged_s: float
    place: Place
    bound_s: float
    timeout_s: float
    is_warm: bool
    idle_s: float = math.inf
    times_out_itself: bool = True
    has_not_worked: bool = False

    @property
    def is_excused(self) -> bool:
        """Whether the step is beyond its bound because somebody works.

        That is no hang before the time-out, which in a collective comes by itself.
        """
        is_in_time = self.step_s < self.timeout_s or self.place is Place.COLLECTIVE
        return is_in_time and self.step_s >= self.bound_s and self.idle_s < idle_bound_s(self.bound_s)

    @property
    def is_guessed_soon(self) -> bool:
        """Whether a worker in its own code, of which no work is seen, is about to be taken for a hang."""
        is_late = self.is_warm and self.step_s >= STALL_SHARE * self.bound_s and self.unchanged_s > 0.0
        return self.place is Place.USER_CODE and is_late and self.has_not_worked

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


@dataclass(frozen=True)
class AbortedStep:
    """What a worker knows of a step that was given up, before it knows who is in the next round.

    Attributes:
        has_timed_out: a collective has timed out in it.
        another_ran: another rank was in its own code meanwhile, at work or not.
        others_were_busy: another rank was known to work, or was in a slow section.
    """

    has_timed_out: bool = False
    another_ran: bool = False
    others_were_busy: bool = False


@dataclass(frozen=True)
class Lesson:
    """What the next round shows of a group that was given up.

    Attributes:
        was_long_step: the step was only a long one, and is measured as one.
        has_only_waited: collectives have timed out for a rank that neither worked nor hung.
        is_mistaken_end: whoever was ended may only have been slow.
        is_longer_timeout: collectives have more time from now on.
    """

    was_long_step: bool
    has_only_waited: bool
    is_mistaken_end: bool
    is_longer_timeout: bool


class Timeouts:
    """The time-outs of one worker, which grow where they have proved too short.

    Args:
        policy: see `HangPolicy`.
        timeout_s: of collectives.

    Attributes:
        timeout_s: of collectives, at present. One that the user has chosen never grows.
        silence_bound_s: for how long a rank may give no sign of life between steps.

    >>> timeouts = Timeouts(HangPolicy(factor=10.0, floor_s=3.0), 10.0)
    >>> timeouts.step_aborted(AbortedStep(has_timed_out=True, others_were_busy=True))
    >>> timeouts.learn(nobody_was_lost=True, only_missed_progress=False).is_longer_timeout, timeouts.timeout_s
    (True, 100.0)
    """

    def __init__(self, policy: HangPolicy, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.silence_bound_s = min(policy.floor_s, timeout_s)
        self._policy = policy
        self._was_chosen = timeout_s != DEFAULT_TIMEOUT_MS / 1000
        # of the present round
        self._aborted = AbortedStep()
        self._has_aborted_phase = False

    def bound_s(self, slowest_step_s: float | None) -> float:
        """By `HangPolicy.bound_s`."""
        return self._policy.bound_s(slowest_step_s, self.timeout_s)

    def patience_s(self, bound_s: float, *, others_are_busy: bool) -> float:
        """How long to wait for a live member after a step of that bound was given up, without a margin."""
        return max(self.timeout_s, MIN_BUSY_PATIENCE_S) if others_are_busy else bound_s

    def step_aborted(self, step: AbortedStep) -> None:
        """A step was given up; `learn` follows, once the next round is known."""
        self._aborted = step

    def phase_aborted(self) -> None:
        """What lies between steps was given up, since a rank gave no sign of life; `learn` follows."""
        self._has_aborted_phase = True

    def learn(self, *, nobody_was_lost: bool, only_missed_progress: bool) -> Lesson:
        """The next round is known: what was given up though all came back was no hang. Each is counted once.

        Neither is it known to be one where somebody was ended for missing progress while its process still ran.

        Args:
            nobody_was_lost: all members are in the next round.
            only_missed_progress: no member was lost for another reason than that it made no progress in time.
        """
        step, self._aborted = self._aborted, AbortedStep()
        may_be_mistaken = step.another_ran and only_missed_progress
        has_timed_out_work = step.has_timed_out and step.others_were_busy
        has_only_waited = step.another_ran and step.has_timed_out and nobody_was_lost and not has_timed_out_work
        was_too_short = has_only_waited or (has_timed_out_work and (nobody_was_lost or may_be_mistaken))
        is_longer_timeout = was_too_short and not self._was_chosen
        if is_longer_timeout:
            self.timeout_s = self._policy.longer_timeout_s(self.timeout_s)
        if self._has_aborted_phase and nobody_was_lost:  # who was silent was only busy
            self.silence_bound_s = min(2 * self.silence_bound_s, self.timeout_s)
        self._has_aborted_phase = False
        return Lesson(
            was_long_step=nobody_was_lost or may_be_mistaken,
            has_only_waited=has_only_waited,
            is_mistaken_end=may_be_mistaken and not nobody_was_lost,
            is_longer_timeout=is_longer_timeout,
        )
