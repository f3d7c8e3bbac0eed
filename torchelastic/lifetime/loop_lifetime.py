"""Deadlines in the train loop: samples them, notifies the other ranks, drains in time, or saves and stops.

While every deadline is far, a step reads the clock once. A rank whose deadline is near reports that in the agreement
that the ranks have anyway. From then on all exchange what they know, rarely at first, in the last steps after each, and
make the same plan (`DeadlineMonitor.plan`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from torchelastic.coordinator import Coordinator
from torchelastic.errors import NonRetryableException
from torchelastic.group.peers import Alone, Peers
from torchelastic.lifetime.deadline import nearest
from torchelastic.lifetime.deadline_monitor import CHECK_S, DeadlineMonitor, Lifetime
from torchelastic.lifetime.decision import TRIAL_BELOW_S
from torchelastic.lifetime.drain_policy import StopPlan, on_hosts, who_requeues
from torchelastic.lifetime.iteration_times import IterationTimes
from torchelastic.lifetime.progress_file import ProgressFile, Steps
from torchelastic.lifetime.requeue import StoppedEarly, requeue_job, requeue_patience_s
from torchelastic.lifetime.sample import AT_ONCE, REMAINING, Sample
from torchelastic.lifetime.sources.detection import close_all, detect
from torchelastic.lifetime.sources.slurm import JOB_VARIABLE
from torchelastic.loop_observer import LoopObserver
from torchelastic.metrics import publish_metric
from torchelastic.rendezvous.wire import INIT_METHOD_VARIABLE, SOCKET_VARIABLE

if TYPE_CHECKING:
    from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
    from torchelastic.coordinator import GroupMembership
    from torchelastic.state import State

log = logging.getLogger(__name__)

#: Most steps between two decisions near a deadline: steps may have become longer since the last one.
_MAX_SKIP = 4
#: Attempts of a save before a deadline, while there is time.
MAX_TRIES = 3


class LoopLifetime(LoopObserver):
    """The deadlines of one run, on one rank; all methods are called on the training thread.

    Args:
        coordinator: of the run.
        saves: its checkpoints.
        settings: see `Lifetime`.
        clock: monotonic seconds; that of the deadline.
        environment: variables; default: those of this process.
        host: what ends at a deadline as a whole; default: this machine's name, and the launcher's socket if there is
            one, since two launchers on a machine may be two containers.

    Raises:
        ValueError: a variable with a deadline is invalid; names it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        saves: LoopCheckpoints,
        settings: Lifetime,
        *,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> None:
        self._coordinator, self._saves, self._settings, self._clock = coordinator, saves, settings, clock
        variables = os.environ if environment is None else environment
        launcher = variables.get(SOCKET_VARIABLE, "") if INIT_METHOD_VARIABLE in variables else ""
        self._host = f"{socket.gethostname()} {launcher}" if host is None else host
        self._sources = detect(variables, clock=clock) if settings.deadline is None else []
        self._times = IterationTimes()
        self._monitor = DeadlineMonitor(
            nearest([*self._sources, settings.deadline]),
            self._times,
            lambda: saves.save_times_s,
            settings,
            trial_below_s=0.0,  # a save on trial is made by the checkpoints, in the background: see `_wants_trial`
            clock=clock,
        )
        self._job = variables.get(JOB_VARIABLE, "").strip()
        self._file = ProgressFile.from_environment(variables)
        self._resumed_step: int | None = None
        self._rank, self._world_size = 0, 1
        self._began_s = self._next_sample_s = clock()
        self._remaining_s = math.inf
        self._is_near = False
        self._skip = 0
        self._due_s = -math.inf  # when to decide again, though no step after the last decision was reached
        self._has_tried = False
        self._leaves: str | None = None
        self._requeues = False

    # --- in the loop --------------------------------------------------------------------------------------------------

    def group_formed(self, membership: GroupMembership, rank: int, world_size: int) -> None:  # noqa: ARG002 - part of the contract
        """See `LoopObserver`."""
        self._rank, self._world_size = rank, world_size

    def in_sync(self, state: State) -> None:  # noqa: ARG002 - as above
        """From here on steps are timed, and the deadlines of all ranks count."""
        if self._resumed_step is None:
            self._resumed_step = self._saves.step
            if self._rank == 0 and not self._saves.save_times_s:
                log.warning(
                    "lifetime= without a checkpoint manager: when a deadline comes, the run stops in time, and nothing "
                    "is saved. Give train() a checkpoint="
                )
        self._is_near, self._skip = False, 0
        self._next_sample_s = self._due_s = -math.inf
        self._monitor.enter_group(self._world_size)
        self._began_s = self._clock()

    def after_step(self, state: State) -> None:
        """A step has been committed: leave or stop if a deadline requires it, and save if that is due.

        Raises:
            StoppedEarly: the step is saved, and the run stops here for all of the group.
            NonRetryableException: the same, but it could not be saved.
            RuntimeError: a peer is lost.
        """
        now_s = self._clock()
        self._times.observe(max(0.0, now_s - self._began_s))
        if now_s >= self._next_sample_s:
            self._watch(now_s)
        if not self._coordinator.deadline_is_near(self._is_near):
            self._skip = 0
        elif self._skip > 0:
            self._skip -= 1
        else:
            self._decide(state)
        self._saves.after_step(state, on_trial=self._wants_trial())
        self._began_s = self._clock()  # the time since `now_s` is no part of a step

    def _wants_trial(self) -> bool:
        """Whether to save now only to measure it; called once after each step."""
        if self._has_tried or self._remaining_s > TRIAL_BELOW_S:
            return False
        self._has_tried = True
        return not all(self._saves.save_times_s.values())

    def returns(self, *, has_left: bool) -> None:
        """See `LoopObserver`.

        Raises:
            StoppedEarly: it has left because of its deadline.
        """
        if has_left and self._leaves is not None:
            if self._requeues:
                self._requeue()
            raise StoppedEarly(self._leaves, step=self._saves.step, others_go_on=True)

    def over(self) -> None:
        """Ends the sources of deadlines, and restores signal handlers. Idempotent."""
        self._report_progress(self._clock())
        close_all(self._sources)

    # --- what this rank knows -----------------------------------------------------------------------------------------

    def _watch(self, now_s: float) -> None:
        self._next_sample_s = now_s + CHECK_S
        if self._file.is_due(now_s):
            self._report_progress(now_s)
        self._remaining_s = self._monitor.remaining_s()
        if self._remaining_s == math.inf:
            self._is_near = False
            return
        own = self._sample()
        # after a decision that found time enough the clock determines the next one: steps may have become longer
        self._is_near = self._monitor.is_near(own, may_leave=True) and (
            own.at_once_s < math.inf or now_s >= self._due_s
        )

    def _sample(self) -> Sample:
        """What this rank knows now, for the next step."""
        return self._monitor.sample(count=self._saves.step, lived=self._times.count, is_near=True)

    # --- what all know ------------------------------------------------------------------------------------------------

    def _decide(self, state: State) -> None:
        """On every rank after the same step."""
        now_s, own, peers = self._clock(), self._sample(), self._coordinator.peers() or Alone()
        self._remaining_s = own.remaining_s
        numbers, jobs, hosts = zip(*peers.all_gather([own.numbers(), self._job, self._host]), strict=True)
        try:
            common = own.agreed([max(column) for column in zip(*numbers, strict=True)])
        except ValueError:
            raise NonRetryableException(
                "the ranks save to different tiers: give train() the same checkpoint="
            ) from None
        plan = self._monitor.plan(
            common,
            remaining_s=on_hosts([-rank_numbers[REMAINING] for rank_numbers in numbers], hosts),
            at_once_s=on_hosts([-rank_numbers[AT_ONCE] for rank_numbers in numbers], hosts),
            min_workers=self._coordinator.min_workers,
        )
        # one rank goes by the clock; several have to decide after the same step, so they skip a few at most
        self._skip = 0 if peers.world_size == 1 else min(plan.decide_again_in, _MAX_SKIP)
        self._due_s = now_s + plan.decide_again_s
        self._is_near = self._is_near and plan.decide_again_s == 0.0
        end_s = now_s + plan.end_s
        if plan.stops:
            self._stop(state, plan, end_s, peers, is_mine=peers.rank in who_requeues(jobs, range(len(jobs))))
        if peers.rank in plan.leaving and self._leaves is None:
            self._leave(is_mine=peers.rank in who_requeues(jobs, plan.leaving))
        if plan.decision.saves:
            # those who stay take part, and those who leave
            log.warning("step %d: %s (deadline: %s)", self._saves.step, plan.decision, self._deadline_text())
            self._saves.save_last(state, self._patience_s(end_s))
        if plan.decision.action == "save and go on":
            self._decide(state)  # knowing how long that took: there may be no time to go on

    def _leave(self, *, is_mine: bool) -> None:
        self._leaves = (
            f"the deadline of this worker is near ({self._remaining_s:.1f} s are left; {self._deadline_text()}): it "
            "leaves at the end of a step, and the others go on"
        )
        self._requeues = is_mine
        log.warning("step %d: %s", self._saves.step, self._leaves)
        self._coordinator.leave()

    def _stop(self, state: State, plan: StopPlan, end_s: float, peers: Peers, *, is_mine: bool) -> NoReturn:
        step = self._saves.step
        log.warning("step %d: %s (deadline: %s)", step, plan.decision, self._deadline_text())
        publish_metric("torchelastic", "lifetime.given_up.expected.ms", 1000.0 * plan.decision.given_up_s)
        has_manager = bool(self._saves.save_times_s)
        tiers = self._save(state, plan, end_s, peers) if has_manager else ()
        left_s = end_s - self._clock()
        self._saves.stop_waiting()
        self._coordinator.stop_early()
        self.over()
        publish_metric("torchelastic", "lifetime.given_up.ms", 1000.0 * left_s)
        in_time = f"{left_s:.1f} s before the deadline" if left_s >= 0.0 else f"{-left_s:.1f} s after the deadline"
        if has_manager and not tiers:
            raise NonRetryableException(
                f"stopped after step {step}, {in_time}, and it could not be saved: see the errors above. The next "
                "start goes on from the checkpoint before"
            )
        saved = f"saved in {', '.join(tiers)}" if tiers else "nothing is saved"
        because = f"stopped after step {step}, {in_time}; {saved}"
        log.warning("%s", because)
        if is_mine:
            self._requeue()
        raise StoppedEarly(because, step=step, saved_in=tiers)

    def _save(self, state: State, plan: StopPlan, end_s: float, peers: Peers) -> tuple[str, ...]:
        """The tiers in which the step is durable on rank 0; retried while there is time. Raises RuntimeError."""
        needed_s = min(seconds for name, seconds in plan.decision.numbers.items() if name.startswith("save_"))
        for _ in range(MAX_TRIES):
            began_s = self._clock()
            tiers = self._saves.save_last(state, self._patience_s(end_s))
            now_s = self._clock()
            try:
                results = peers.all_gather([tiers, end_s - now_s, now_s - began_s])
            except RuntimeError:
                if not tiers:
                    raise
                return tiers  # a rank is lost; what is saved is saved
            # the bound may be a long guess: what the attempt took is enough
            longest_s = max(took_s for *_, took_s in results)
            if results[0][0] or min(left_s for _, left_s, _ in results) < min(needed_s, longest_s):
                return tuple(results[0][0])
            log.error("step %d could not be saved; retrying, as there is time", self._saves.step)
        return ()

    def _patience_s(self, end_s: float) -> float:
        """Time-out of a save: half of the reserve is for what comes after it."""
        return max(end_s - self._clock(), self._settings.reserve_s) - self._settings.reserve_s / 2.0

    def _requeue(self) -> None:
        patience_s = requeue_patience_s(self._monitor.remaining_s())
        asked = requeue_job(max_restarts=self._settings.max_restarts, patience_s=patience_s)
        log.warning("requeue: %s", asked.because)

    def _deadline_text(self) -> str:
        return self._monitor.deadline_text("of another worker")

    def _report_progress(self, now_s: float) -> None:
        if self._rank == 0 and self._resumed_step is not None:
            steps = Steps(self._resumed_step, self._saves.step, self._saves.saved_step)
            self._file.report(steps, now_s)
