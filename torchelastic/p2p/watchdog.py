"""Notices that a step does not end: a thread that nearly always sleeps, and looks when one is late.

The coordinator tells it of rounds and steps, on the training thread, at the cost of a few attribute writes per step.
What is done about a late step is decided in `hangs.py`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchelastic.metrics import publish_metric
from torchelastic.p2p.hangs import LOOK_SHARE, Act, HangPolicy, Look, Place, Suspicion, has_stood_since_s
from torchelastic.p2p.stacks import lines_of_error, look_at, where
from torchelastic.p2p.stands import Stand
from torchelastic.p2p.step_clock import StepClock
from torchelastic.rendezvous.loss import is_time_out

log = logging.getLogger(__name__)

#: The exit code of a worker that its own watchdog has ended.
EXIT_CODE = 70
#: Looks are not more frequent, however short the bound.
MIN_PAUSE_S = 0.02


class Watchdog:
    """The watchdog of one worker; all methods are called on the training thread.

    Args:
        policy: see `HangPolicy`.
        timeout_s: of collectives.
        cut: gives the group up, on the watchdog's thread.

    Attributes:
        stand: where the last step was given up, by this watchdog or by an error; None if none was.
        has_cut: whether this watchdog did.
        has_noticed_hang: whether it did, or a collective timed out.
    """

    def __init__(self, policy: HangPolicy, timeout_s: float, cut: Callable[[], object]) -> None:
        self.policy = policy
        self.stand: Stand | None = None
        self.has_cut = False
        self.has_noticed_hang = False
        self._timeout_s = timeout_s
        self._cut = cut
        self._step = StepClock(time.monotonic)
        # looked up here once: called after each step
        self.step_ended = self._step.ended
        self._training_thread = 0
        self._rank, self._is_alone, self._first_step = -1, True, 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._patience_bound_s = timeout_s
        # of the step that is late: by when it began
        self._late_step: float | None = None
        self._look: Look | None = None
        self._stood_since_s: float | None = None
        self._done = Act.NOTHING

    # --- told by the coordinator, on the training thread ----------------------------------------------------------

    @property
    def bound_s(self) -> float:
        """How long a step may take at present before this worker is suspected to hang."""
        return self.policy.bound_s(self._step.slowest_s if self._step.is_warm else None, self._timeout_s)

    @property
    def patience_s(self) -> float:
        """How long a member that lives and does not come to the next round is to be waited for, without a margin.

        The bound if a step was given up; the time-out if something else was (a sync, a checkpoint), that takes longer.
        """
        return self._patience_bound_s

    def new_round(self) -> None:
        """A group is being formed."""
        self._step.new_round()
        self._patience_bound_s = self._timeout_s
        self.stand, self.has_cut, self.has_noticed_hang = None, False, False

    def begin(self, rank: int, world_size: int, step: int) -> None:
        """The state is level after `step` committed steps: the first one of this round begins."""
        self._rank, self._is_alone, self._first_step = rank, world_size == 1, step
        self._training_thread = threading.get_ident()
        self._step.begin()
        self._patience_bound_s = self.bound_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchelastic-watchdog", daemon=True)
            self._thread.start()
        self._wake.set()

    def leave(self) -> None:
        """The group is left, for whatever reason: nothing is timed before the next `begin`."""
        if self._step.began_s is not None:
            self._patience_bound_s = self.bound_s
        self._step.rest()

    def failed(self, error: BaseException) -> None:
        """The step has failed, or what followed it."""
        if self._step.began_s is None:
            return
        self._patience_bound_s = self.bound_s
        self._step.failed()
        if self.stand is None:
            self.stand = self._stand(where(lines_of_error(error.__traceback__)))
        self.has_noticed_hang = self.has_noticed_hang or is_time_out(error)

    def came_back(self, nobody_was_lost: bool) -> None:
        """The next round is known: a step that was given up though all came back was only a long one."""
        self._step.counts_failure(nobody_was_lost)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Time nothing inside: a checkpoint takes as long as it takes. The step begins anew afterwards."""
        self._step.rest()
        self._patience_bound_s = self._timeout_s
        yield
        self._step.begin()
        self._patience_bound_s = self.bound_s
        self._wake.set()

    def end(self) -> None:
        """The run is over for this worker. Idempotent."""
        self._step.rest()
        self._is_over = True
        self._wake.set()

    def _stand(self, line: str) -> Stand:
        return Stand(self._rank, self._first_step + self._step.round_steps, line)

    # --- on the watchdog's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(None if self._step.began_s is None else self._pause_s())
            self._wake.clear()
            try:
                self._watch()
            except Exception:  # a watchdog that fails must not end silently, nor end the training
                log.exception("the watchdog could not look at the training thread")

    def _pause_s(self) -> float:
        """Until the next look, by the shortest bound that may hold by then: the first steps of a round end soon."""
        shortest_s = self.policy.bound_s(self._step.slowest_s or 0.0, self._timeout_s)
        return max(MIN_PAUSE_S, LOOK_SHARE * shortest_s)

    def _watch(self) -> None:
        began_s = self._step.began_s
        bound_s = self.bound_s
        if began_s is None or time.monotonic() - began_s < LOOK_SHARE * bound_s:
            return
        if began_s != self._late_step:
            self._late_step, self._look, self._stood_since_s, self._done = began_s, None, None, Act.NOTHING
        look, line = look_at(self._training_thread)
        self._stood_since_s = has_stood_since_s(self._stood_since_s, self._look, look)
        self._look = look
        suspicion = Suspicion(
            step_s=look.at_s - began_s,
            stood_s=look.at_s - self._stood_since_s,
            place=Place.USER_CODE if self._is_alone else look.place,
            bound_s=bound_s,
            timeout_s=self._timeout_s,
            is_warm=self._step.is_warm,
        )
        act = suspicion.act(self.policy)
        if act.value > self._done.value and self._step.began_s == began_s:
            self._done = act
            self._do(act, suspicion, line)

    def _do(self, act: Act, suspicion: Suspicion, line: str) -> None:
        text = f"no step for {suspicion.step_s:.1f} s (bound {suspicion.bound_s:.1f} s), a guess that there is a hang"
        publish_metric("torchelastic", "hang.suspected.duration.ms", 1000 * suspicion.step_s)
        if act is Act.CUT:
            self.stand, self.has_cut, self.has_noticed_hang = self._stand(line), True, True
            log.warning("%s: this worker waits for others in %s; the group is given up", text, line)
            self._cut()
            return
        log.warning("%s: this worker is in user code, in %s; its stacks:", text, line)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        if act is Act.END:
            log.error("the policy ends this worker: end_after_s=%s", self.policy.end_after_s)
            logging.shutdown()
            os._exit(EXIT_CODE)
