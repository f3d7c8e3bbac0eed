"""When the train loop saves: the memory that a save policy, which is a value, does not have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torchelastic.checkpoint.policy import FailureRate, SaveCosts, SaveDecision, SaveMoment, SavePolicy
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: The weight of the newest step in the smoothed time of a step.
STEP_WEIGHT = 0.1


@dataclass(frozen=True)
class _Mark:
    """When the last save began, or a state was restored."""

    step: int
    at_s: float


class SaveSchedule:
    """Asks a policy after each committed step, and remembers for it what it has to know.

    Every rank has one and tells it the same; only rank 0 asks, since clocks differ. All methods but `saved` are called
    on the training thread.

    Args:
        policy: decides; None: only what the state or the coordinator asks for is saved.
        clock: monotonic seconds.

    Attributes:
        costs: what saves have cost so far, by tier.
        failures: how often something has failed.
        is_due_at_end: whether a save is due after the step that was decided on last if no other follows it: one that
            was deferred, say. What was due at the end of a run stays so until something is saved.
    """

    def __init__(self, policy: SavePolicy | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._began = _Mark(0, clock())
        self._last: _Mark | None = None
        self._is_deferred = self.is_due_at_end = False
        self._step_began_s: float | None = None
        self._step_s: float | None = None
        self._looked_s = self._began.at_s
        self.costs = SaveCosts()
        self.failures = FailureRate()

    def enter_group(self, step: int) -> None:
        """A group has formed, in sync after `step` steps."""
        if self._last is None and self._began.step == 0:
            self._began = _Mark(step, self._began.at_s)
        self._step_began_s = self._clock()

    def step_ended(self) -> None:
        """A step was committed."""
        now_s = self._clock()
        if self._step_began_s is not None:
            took_s = max(0.0, now_s - self._step_began_s)
            self._step_s = took_s if self._step_s is None else self._step_s + STEP_WEIGHT * (took_s - self._step_s)
        self._step_began_s = now_s

    def decide(self, step: int, *, wanted: bool, saving: bool, is_full: bool, stop_requested: bool) -> SaveDecision:
        """Whether to save after this step.

        Args:
            step: committed steps of the run.
            wanted: the state or the coordinator asks for it: then it is saved whatever the policy says.
            saving: whether a save still runs in the background.
            is_full: whether one more could not begin without waiting. A policy is put off then; its reason to save
                stands until it is heard.
            stop_requested: whether a worker was asked to leave.
        """
        if wanted:
            return SaveDecision(True, "the state or the coordinator asks for it")
        if self._policy is None:
            return SaveDecision(False, "there is no policy")
        now_s = self._clock()
        self.failures = self.failures.observed(max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        last = self._last
        moment = SaveMoment(
            step=step,
            now_s=now_s,
            last_saved_step=None if last is None else last.step,
            last_saved_s=None if last is None else last.at_s,
            began_s=self._began.at_s,
            saving=saving,
            stop_requested=stop_requested,
            step_s=self._step_s,
            costs=self.costs,
            failures=self.failures,
            began_step=self._began.step,
            run_ends=not self.is_due_at_end,
        )
        decision = self._policy.decide(moment)
        if decision.save and moment.run_ends:
            self.is_due_at_end = True
            decision = self._policy.decide(replace(moment, run_ends=False))
        is_deferred = decision.save and is_full and not stop_requested
        if is_deferred and not self._is_deferred:
            log.warning("step %d: the save is deferred, all slots are busy; save more rarely", step)
            publish_metric("torchelastic", "checkpoint.put_off", 1)
        self._is_deferred = is_deferred
        if is_deferred:
            return SaveDecision(False, f"deferred, all slots are busy: {decision.because}", decision.numbers)
        return decision

    def began(self, step: int) -> None:
        """A save of this step begins, or this step was restored."""
        self._last = _Mark(step, self._clock())
        self.is_due_at_end = False

    def resumes(self) -> None:
        """Training goes on after a save: its time is not the step's."""
        self._step_began_s = self._clock()

    def saved(self, tier: str, *, stall_s: float, durable_s: float) -> None:
        """A save is durable in a tier; from any thread."""
        with self._lock:
            self.costs = self.costs.observed(tier, stall_s=stall_s, durable_s=durable_s)

    def failed(self, failure_class: str) -> None:
        """Something has failed and taken the group with it."""
        self.failures = self.failures.failed(failure_class)


class TierSchedules:
    """Which tiers take part in a save: each may have a policy that makes it rarer than saves are. Asked on rank 0.

    Args:
        policies: of each tier, by its name; None: it takes part in all.
        clock: monotonic seconds.
    """

    def __init__(self, policies: Mapping[str, SavePolicy | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._policies = policies
        self._clock = clock
        self.begin(0)

    def begin(self, step: int) -> None:
        """The run goes on from this step, which is saved already."""
        self._schedules = {name: SaveSchedule(policy, self._clock) for name, policy in self._policies.items()}
        for schedule in self._schedules.values():
            schedule.enter_group(step)

    def due(self, step: int, *, everywhere: bool = False) -> list[str]:
        """The names of the tiers that are to take part in a save after this step; with `everywhere` all are."""
        due = []
        for name, schedule in self._schedules.items():
            wanted = everywhere or self._policies[name] is None
            if schedule.decide(step, wanted=wanted, saving=False, is_full=False, stop_requested=False):
                due.append(name)
        return due

    def began(self, step: int, tiers: Iterable[str]) -> None:
        """These tiers take part in a save after this step."""
        for name in tiers:
            self._schedules[name].began(step)
