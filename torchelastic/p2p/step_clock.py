"""How long steps take, and for how long the present one has: a few attribute writes per step.

Written on the training thread, read by the watchdog's; every attribute is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

from torchelastic.p2p.hangs import WARM_UP_STEPS


class StepClock:
    """The clock of one worker.

    Args:
        clock: monotonic seconds.

    Attributes:
        began_s: when the present step began; None: outside of steps (rendezvous, sync, saving), where nothing is timed.
        slowest_s: the slowest step of the run, without the first ones of each round; None: none is known.
        round_steps: steps committed in this round.
    """

    __slots__ = ("_clock", "_excused_s", "_failed_s", "began_s", "round_steps", "slowest_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.began_s: float | None = None
        self.slowest_s: float | None = None
        self.round_steps = 0
        self._clock = clock
        self._excused_s: float | None = None
        self._failed_s: float | None = None

    @property
    def is_warm(self) -> bool:
        """Whether the round's first steps are over and at least one other step has been measured."""
        return self.round_steps >= WARM_UP_STEPS and self.slowest_s is not None

    def new_round(self) -> None:
        """A group is being formed: its first steps will be those of a warm-up."""
        self.began_s = None
        self.round_steps = 0

    def begin(self) -> None:
        """From now on the worker is in a step."""
        self.began_s = self._clock()

    def ended(self) -> None:
        """The step has committed; the next one begins."""
        now_s, began_s = self._clock(), self.began_s
        if began_s is not None and self.round_steps >= WARM_UP_STEPS and began_s != self._excused_s:
            self.learn(now_s - began_s)
        self.round_steps += 1
        self.began_s = now_s

    def excuse(self, began_s: float) -> None:
        """The step that began then is long for a reason that is known: if it commits it is not measured.

        On the watchdog's thread.
        """
        self._excused_s = began_s

    def rest(self) -> None:
        """From now on nothing is timed. Idempotent."""
        self.began_s = None

    def failed(self) -> None:
        """The step has failed; how long it took may count, see `counts_failure`."""
        if self.began_s is not None:
            self._failed_s = self._clock() - self.began_s if self.is_warm else None
            self.began_s = None

    def counts_failure(self, nobody_was_lost: bool) -> None:
        """After a failure: if all came back, the step that failed was no hang but a long step, and is measured as one.

        So a false alarm is not repeated: the next bound is a multiple of the time that was too short.
        """
        failed_s, self._failed_s = self._failed_s, None
        if failed_s is not None and nobody_was_lost:
            self.learn(failed_s)

    def learn(self, step_s: float) -> None:
        """A step may take so long."""
        if self.slowest_s is None or step_s > self.slowest_s:
            self.slowest_s = step_s
