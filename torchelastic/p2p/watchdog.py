"""Detects that a step does not end: a thread that nearly always sleeps, and samples when one is late.

The coordinator notifies it of rounds and steps, on the training thread, at the cost of a few attribute writes per step.
What is done about a late step, and how its time-outs grow, is decided in `hangs.py`; `late_step.py` holds its samples.
Between steps (forming a group, the sync, a save) nothing is late: some of that takes as long as it takes. There it
watches the signs of life of the other ranks instead.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from torchelastic.metrics import publish_metric
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.p2p import hang_location
from torchelastic.p2p.busy import BusySigns, publish_slowest
from torchelastic.p2p.hang_location import HangLocation
from torchelastic.p2p.hangs import (
    DEFAULT_TIMEOUT_MS,
    SAMPLE_FRACTION,
    AbortedStep,
    Act,
    HangPolicy,
    Place,
    Suspicion,
    ThreadSample,
    Timeouts,
    idle_bound_s,
)
from torchelastic.p2p.heartbeat import BEAT_S, Heartbeat
from torchelastic.p2p.late_step import LateStep
from torchelastic.p2p.stacks import lines_of_error, sample_thread, where
from torchelastic.p2p.step_clock import StepClock
from torchelastic.rendezvous.loss import Loss, MissedProgress, is_time_out
from torchelastic.rendezvous.round_store import SILENT_S, StoreSilentError
from torchelastic.text import listed

log = logging.getLogger(__name__)

#: The exit code of a worker that its own watchdog has ended.
EXIT_CODE = 70
#: Others may have the default time-out (new processes do), so who is late says so well before that is over.
_LONGEST_UNSEEN_S = DEFAULT_TIMEOUT_MS / 1000
#: Least pause between two samples, however short the bound.
MIN_PAUSE_S = 0.02
_TOO_BUSY = (
    "collectives have timed out while the others waited for %s: give CoordinatorP2P a process_group_timeout (in "
    "milliseconds) that is longer than this work takes; it is %g s"
)
_ONLY_WAITED = (
    "collectives have timed out after %g s while rank %d only waited, in %s, and came back: put `with "
    "coordinator.slow_section():` around that, or give CoordinatorP2P a longer process_group_timeout (in milliseconds)"
)
_MAY_BE_MISTAKEN = (
    "rank %d was ended while its process still ran, in %s: if it was only slow, put `with coordinator.slow_section():` "
    "around that; a step may take %.0f s from now on"
)
_GUESSED_SOON = (
    "this worker has been in its own code for %.1f s, in %s, and nothing is seen of work (processor time, reads and "
    "writes, processes that it has started): after %.1f s the others take that for a hang, a guess by the steps so far,"
    " and it is ended unless it comes back soon; if it only waits, put `with coordinator.slow_section():` around that, "
    "or give CoordinatorP2P a process_group_timeout (in milliseconds), which is kept (said once; the bound is %.1f s)"
)
#: What lies between steps and takes no longer is not watched.
SHORT_PHASE_S = 1.0
#: Of the phases between steps: members of a round connect to each other.
FORMING = "forming the group"


class Watchdog:
    """The watchdog of one worker; all methods are called on the training thread.

    Args:
        policy: see `HangPolicy`.
        timeout_s: of collectives.
        cut: gives the group up, on the watchdog's thread.
        times_out_itself: see `Suspicion`.
        keeps_timeout: whether a rank that is in its own code, at work or not, is no hang before the time-out: the user
            has chosen that, and no policy.

    Attributes:
        location: where the last step was aborted, by this watchdog or by an error; None if none was.
        has_cut: whether this watchdog did.
        has_noticed_hang: whether it did, or a collective timed out.
    """

    def __init__(
        self,
        policy: HangPolicy,
        timeout_s: float,
        cut: Callable[[], object],
        *,
        times_out_itself: bool = True,
        keeps_timeout: bool = False,
    ) -> None:
        self.policy = policy
        self.location: HangLocation | None = None
        self.has_cut = False
        self.has_noticed_hang = False
        self._timeouts = Timeouts(policy, timeout_s)
        self._cut = cut
        self._times_out_itself, self._keeps_timeout = times_out_itself, keeps_timeout
        self._has_said_guess = False
        self._step = StepClock(time.monotonic)
        # resolved once: called after each step
        self.step_ended = self._step.ended
        self._training_thread = 0
        self._rank, self._is_alone, self._first_step = -1, True, 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_over = False
        #: how long to wait for a live member that does not join the next round, without a margin: the bound if a step
        #: was given up; the time-out if something else was (a sync, a checkpoint), that takes longer
        self.patience_s = timeout_s
        self._late: LateStep | None = None
        # of the step that was given up: who of the others still ran in its own code; whether this watchdog timed it out
        self._ran: HangLocation | None = None
        self._has_timed_out = False
        # between steps
        self._phase: tuple[str, float] | None = None
        self._heartbeat: Heartbeat | None = None

    # --- called by the coordinator, on the training thread ----------------------------------------------------------

    @property
    def bound_s(self) -> float:
        """How long a step may take at present before this worker is suspected to hang."""
        return self._timeouts.bound_s(self._step.slowest_s if self._step.is_warm else None)

    def enter(self, phase: str, heartbeat: Heartbeat | None = None) -> None:
        """Between steps: something begins that needs all ranks; until the next `enter`, `begin`, `leave` or `failed`.

        Args:
            phase: what, in words.
            heartbeat: of the group that does it, until `leave`; None: as before.
        """
        self._heartbeat = heartbeat or self._heartbeat
        self._begin_phase(phase)

    def publish(self, store: Store, rank: int) -> None:
        """Before a group is formed: publish where the step was aborted, and on rank 0 how long steps may take.

        A new process would suspect a hang in the first long step, for which the others have learned to wait.
        """
        if self.location is not None:
            hang_location.publish(store, rank, self.location, self.has_noticed_hang)
        if rank == 0 and self._step.slowest_s is not None:
            publish_slowest(store, self._step.slowest_s)

    def new_round(self) -> None:
        """A group is being formed."""
        self._step.new_round()
        self.patience_s = self._timeouts.timeout_s
        self.location, self.has_cut, self.has_noticed_hang, self._ran = None, False, False, None

    def begin(self, rank: int, world_size: int, step: int) -> None:
        """The state is in sync after `step` committed steps: the first one of this round begins."""
        self._rank, self._is_alone, self._first_step = rank, world_size == 1, step
        self._training_thread = threading.get_ident()
        self._end_phase()
        self._step.begin()
        self.patience_s = self.bound_s
        self._wake_up()

    def leave(self, *, is_over: bool = False) -> None:
        """The group is left, for whatever reason: nothing is timed before the next `begin`.

        Args:
            is_over: the run is: signs of life are still given, since others may wait for what this rank saves.
        """
        if self._step.began_s is not None:
            self.patience_s = self._patience_of_step_s()
        self._step.rest()
        self._end_phase()
        if self._heartbeat is not None and not is_over:
            self._heartbeat.end()
            self._heartbeat = None

    def failed(self, error: BaseException) -> None:
        """The step has failed, or what followed it, or a phase between steps, or the way into a group."""
        if isinstance(error, StoreSilentError):  # no phase yet, and no heartbeat: both begin with this store
            self._aborts_for_silence(FORMING, {0: SILENT_S})
        if self._phase is not None and self._silent(0.5 * self._timeouts.silence_bound_s):
            # a peer has noticed it a moment earlier, and its cut is the error
            self.patience_s = self._timeouts.silence_bound_s
        self._end_phase()
        if self._step.began_s is None:
            return
        self.patience_s = self._patience_of_step_s()
        signs = self._signs()
        if signs is not None:
            self._ran = signs.works or signs.stuck
            has_timed_out, others_were_busy = self._has_timed_out or is_time_out(error), self._others_are_busy()
            self._timeouts.step_aborted(AbortedStep(has_timed_out, self._ran is not None, others_were_busy))
            if has_timed_out and others_were_busy:
                log.warning(_TOO_BUSY, signs.who(), self._timeouts.timeout_s)
        self._step.failed()
        if self.location is None:
            self.location = self._location(where(lines_of_error(error.__traceback__)))
        self.has_noticed_hang = self.has_noticed_hang or is_time_out(error)

    def came_back(self, lost: Collection[Loss]) -> timedelta:
        """The next round is known: a step that was given up though all came back was only a long one.

        So may it have been where somebody was ended for missing progress while its process still ran.

        Returns:
            The time-out of collectives from now on.
        """
        members = [loss for loss in lost if loss.member]
        ran, timeout_s = self._ran, self._timeouts.timeout_s
        lesson = self._timeouts.learn(
            nobody_was_lost=not members,
            only_missed_progress=all(isinstance(loss, MissedProgress) for loss in members),
        )
        self._step.counts_failure(lesson.was_long_step)
        self._ran, self._has_timed_out = None, False
        if ran is not None and lesson.has_only_waited:
            log.warning(_ONLY_WAITED, timeout_s, ran.rank, ran.where or "its own code")
        if lesson.is_longer_timeout:
            log.warning("in this process collectives time out after %g s from now on", self._timeouts.timeout_s)
        if ran is not None and lesson.is_mistaken_end:
            bound_s = self._timeouts.bound_s(self._step.slowest_s)
            log.warning(_MAY_BE_MISTAKEN, ran.rank, ran.where or "its own code", bound_s)
        return timedelta(seconds=self._timeouts.timeout_s)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Time nothing inside: a checkpoint may take any time. The step begins anew afterwards."""
        self._step.rest()
        self.patience_s = self._timeouts.timeout_s
        self._begin_phase("saving a checkpoint")
        yield
        self._end_phase()
        self._step.begin()
        self.patience_s = self.bound_s
        self._wake.set()

    @contextmanager
    def slow_section(self) -> Iterator[None]:
        """Time nothing inside, and publish that this rank is busy; see `Coordinator.slow_section`."""
        signs, is_in_step = self._signs(), self._step.began_s is not None
        self._step.rest()
        if signs is not None:
            signs.begin_section()
        try:
            yield
        finally:
            if signs is not None:
                signs.end_section()
            if is_in_step and signs is self._signs() and self._phase is None:
                self._step.begin()
                self._wake.set()

    def end(self) -> None:
        """The run is over for this worker. Idempotent."""
        self.leave(is_over=True)
        self._is_over = True
        self._wake.set()

    def _begin_phase(self, phase: str) -> None:
        self._end_phase()
        self._phase = phase, time.monotonic()
        self._wake_up()

    def _end_phase(self) -> None:
        self._phase = None
        if self._heartbeat is not None:
            self._heartbeat.rest()

    def _wake_up(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchelastic-watchdog", daemon=True)
            self._thread.start()
        self._wake.set()

    def _signs(self) -> BusySigns | None:
        heartbeat = self._heartbeat
        return None if heartbeat is None else heartbeat.busy

    def _patience_of_step_s(self) -> float:
        return self._timeouts.patience_s(self.bound_s, others_are_busy=self._others_are_busy())

    def _others_are_busy(self) -> bool:
        signs = self._signs()
        return signs is not None and signs.is_busy(idle_bound_s(self.bound_s))

    def _location(self, line: str) -> HangLocation:
        return HangLocation(self._rank, self._first_step + self._step.round_steps, line)

    # --- on the watchdog's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            try:
                self._watch()
                self._watch_phase()
            except Exception:  # a watchdog that fails must not end silently, nor end the training
                log.exception("the watchdog could not sample the training thread")

    def _pause_s(self) -> float | None:
        """Until the next sample, by the shortest bound that may hold by then: the first steps of a round end soon."""
        if self._phase is not None:
            return BEAT_S
        if self._step.began_s is None:
            return None
        shortest_s = self._timeouts.bound_s(self._step.slowest_s or 0.0)
        return max(MIN_PAUSE_S, SAMPLE_FRACTION * min(shortest_s, _LONGEST_UNSEEN_S))

    def _watch(self) -> None:
        signs = self._signs()
        if signs is not None and signs.slowest_s is not None:
            self._step.learn(signs.slowest_s)
        began_s = self._step.began_s
        bound_s = self.bound_s
        if began_s is None or time.monotonic() - began_s < SAMPLE_FRACTION * min(bound_s, _LONGEST_UNSEEN_S):
            if signs is not None:
                signs.rest()
            return
        late = self._late
        if late is None or late.began_s != began_s:
            late = self._late = LateStep(began_s)
        sample, line = sample_thread(self._training_thread)
        late.add(sample)
        place = Place.USER_CODE if self._is_alone else sample.place
        suspicion = Suspicion(
            step_s=sample.at_s - began_s,
            unchanged_s=late.unchanged_s(sample.at_s),
            place=place,
            bound_s=bound_s,
            timeout_s=self._timeouts.timeout_s,
            is_warm=self._step.is_warm,
            idle_s=self._exchange_signs(late, place, sample, line),
            times_out_itself=self._times_out_itself,
            has_not_worked=late.idle_s(sample.at_s) == math.inf,
        )
        if suspicion.is_excused:
            self._step.excuse(began_s)
        if suspicion.is_guessed_soon and not self._is_alone and late.is_first_guess():
            self._say_guess(suspicion, line)
        act = suspicion.act(self.policy)
        if self._step.began_s == began_s and late.goes_further(act):
            self._do(act, suspicion, line)

    def _exchange_signs(self, late: LateStep, place: Place, sample: ThreadSample, line: str) -> float:
        """Publish that this rank is late; returns for how long no rank has worked, see `Suspicion`."""
        signs = self._signs()
        if signs is not None and (late.works or place is Place.USER_CODE):
            signs.give(self._location(line), works=late.works)
        if place is Place.USER_CODE:
            return 0.0 if self._keeps_timeout and not self._is_alone else late.idle_s(sample.at_s)
        if signs is None:
            return math.inf
        return signs.quiet_s() if self._keeps_timeout else signs.idle_s()

    def _say_guess(self, suspicion: Suspicion, line: str) -> None:
        """Before anything is done: what is guessed of this rank, and when it will count as a hang."""
        after_s = self._timeouts.timeout_s if self._keeps_timeout else suspicion.bound_s
        this_worker().may_hang(suspicion.step_s, after_s, line)
        if not self._keeps_timeout and not self._has_said_guess:
            self._has_said_guess = True
            log.warning(_GUESSED_SOON, suspicion.step_s, line or "its own code", after_s, suspicion.bound_s)

    def _watch_phase(self) -> None:
        present = self._phase
        if present is None:
            return
        phase, began_s = present
        if time.monotonic() - began_s < SHORT_PHASE_S:
            return
        hung = self._silent(self._timeouts.silence_bound_s)
        if not hung or self._phase is not present:
            return
        self._phase = None
        self._aborts_for_silence(phase, hung)
        self._cut()

    def _aborts_for_silence(self, phase: str, silent_s: dict[int, float]) -> None:
        self.patience_s = self._timeouts.silence_bound_s
        self._timeouts.phase_aborted()
        self.has_cut = self.has_noticed_hang = True
        log.warning(
            "%s: no sign of life from %s for %.1f s, a guess that there is a hang; the group is aborted",
            phase,
            listed(list(silent_s)),
            max(silent_s.values()),
        )

    def _silent(self, bound_s: float) -> dict[int, float]:
        """The ranks that have given no sign of life for so long, and for how long."""
        silent_s = {} if self._heartbeat is None else self._heartbeat.silent_s()
        return {rank: s for rank, s in silent_s.items() if s >= bound_s}

    def _do(self, act: Act, suspicion: Suspicion, line: str) -> None:
        signs = self._signs()
        if act is Act.WAIT:
            who = "another rank" if signs is None else signs.who()
            log.info(
                "no step for %.1f s: this worker waits for %s; collectives time out after %g s",
                suspicion.step_s, who, self._timeouts.timeout_s,
            )  # fmt: skip
            return
        text = f"no step for {suspicion.step_s:.1f} s (bound {suspicion.bound_s:.1f} s), a guess that there is a hang"
        publish_metric("torchelastic", "hang.suspected.duration.ms", 1000 * suspicion.step_s)
        if act is Act.CUT:
            self.location, self.has_cut, self.has_noticed_hang = self._location(line), True, True
            self._has_timed_out = suspicion.has_timed_out
            other = None if signs is None else signs.stuck
            others = "" if other is None else f" (rank {other.rank} is in {other.where or 'its own code'})"
            log.warning("%s: this worker waits for others in %s%s; the group is aborted", text, line, others)
            self._cut()
            return
        log.warning("%s: this worker is in user code, in %s; its stacks:", text, line)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        if act is Act.END:
            log.error("the policy ends this worker: end_after_s=%s", self.policy.end_after_s)
            logging.shutdown()
            os._exit(EXIT_CODE)
