"""What the train loop does about checkpoints: when it saves and loads, on which ranks, and through which manager."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchelastic.checkpoint import api
from torchelastic.checkpoint.api import CheckpointManager
from torchelastic.checkpoint.policy import SaveDecision, SavePolicy
from torchelastic.checkpoint.schedule import SaveSchedule
from torchelastic.checkpoint.tiered.api import ElasticCheckpointManager
from torchelastic.checkpoint.tiered.peers import Alone, Peers
from torchelastic.metrics import publish_metric

if TYPE_CHECKING:
    from torchelastic.coordinator import Coordinator
    from torchelastic.state import State

log = logging.getLogger(__name__)

_NOT_ASKED = SaveDecision(False, "rank 0 decides")


class LoopCheckpoints:
    """The checkpoints of one run, on one rank; all methods are called on the training thread.

    A manager of 0.1 saves on rank 0 and is durable before the next step; an elastic one (`TieredCheckpointManager`)
    takes a share of the state on every rank and does the rest in the background.

    Args:
        coordinator: of the run.
        given: a manager; a policy, for the manager that `set_checkpoint_manager` was given; None: that manager.
        clock: monotonic seconds.

    Raises:
        TypeError: `given` is something else.
        ValueError: a policy was given, and no manager was set.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        given: CheckpointManager | SavePolicy | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if given is not None and not isinstance(given, (CheckpointManager, SavePolicy)):
            raise TypeError(f"checkpoint is a {type(given).__name__}: give a CheckpointManager, or a SavePolicy")
        if isinstance(given, SavePolicy) and api.get_checkpoint_manager() is None:
            raise ValueError(
                "checkpoint is a policy, which says when to save, and there is no manager to save with: call "
                "torchelastic.checkpoint.set_checkpoint_manager first"
            )
        self._coordinator = coordinator
        self._given = given if isinstance(given, CheckpointManager) else None
        policy = given if isinstance(given, SavePolicy) else getattr(self.manager, "policy", None)
        self._schedule = SaveSchedule(policy, clock)
        self._clock = clock
        self._peers: Peers = Alone()
        self._rank = -1
        self._step = 0

    @property
    def manager(self) -> CheckpointManager | None:
        """Who saves; None: nobody."""
        return self._given if self._given is not None else api.get_checkpoint_manager()

    # --- a group ------------------------------------------------------------------------------------------------------

    def enter_group(self, state: State, rank: int, *, synced_before: bool) -> None:
        """A group stands: load a checkpoint if nobody has progress. Every rank calls it, before the sync.

        Args:
            state: is set on rank 0 only; the sync brings the others level.
            rank: of this worker.
            synced_before: whether this process has been level with a group before.
        """
        self._rank = rank
        manager = self.manager
        if manager is None:
            return
        is_wanted = self._coordinator.nobody_has_progress()
        if isinstance(manager, ElasticCheckpointManager):
            self._enter_with_all(manager, state, is_wanted, synced_before=synced_before)
        elif rank == 0 and (not synced_before if is_wanted is None else is_wanted):
            loaded = api.load_latest(manager, state)
            if loaded is not None:
                self._schedule.began(self._step)
            log.info("checkpoint %s loaded", loaded) if loaded else log.info("no checkpoint yet: starting afresh")

    def _enter_with_all(
        self, manager: ElasticCheckpointManager, state: State, is_wanted: bool | None, *, synced_before: bool
    ) -> None:
        self._peers = self._coordinator.peers() or Alone()
        if self._peers.world_size == 1 and self._rank != 0:
            return  # the group is not known: rank 0 does it all
        said = self._peers.tell(json.dumps([self._step, synced_before]).encode())
        self._step, source_was_level = json.loads(said)
        manager.enter_group(self._peers)
        if is_wanted or (is_wanted is None and not source_was_level):
            restored = manager.restore(state, self._peers)
            if restored is not None:
                self._step = restored
                self._schedule.began(restored)

    def is_level(self, state: State) -> None:
        """All members have been brought level: from here on all ranks count the same steps."""
        step = getattr(state, "step", None)
        if type(step) is int and step >= 0:
            self._step = step
        self._schedule.enter_group(self._step)

    def failed(self) -> None:
        """A step or a group has failed."""
        self._schedule.failed("process")

    # --- saving -------------------------------------------------------------------------------------------------------

    def step_committed(self) -> None:
        """One more step counts."""
        self._step += 1
        self._schedule.step_ended()

    def after_step(self, state: State) -> None:
        """Save if it is due; every rank calls it after the same committed step."""
        manager = self.manager
        if manager is None:
            return
        wanted = self._coordinator.should_save_checkpoint() or state.should_save_checkpoint(self._rank)
        leaves = self._coordinator.somebody_leaves()
        decision = self._decide(manager, wanted=wanted, leaves=leaves) if self._rank == 0 else _NOT_ASKED
        if decision:
            log.info("saving step %d: %s", self._step, decision.because)
        if isinstance(manager, ElasticCheckpointManager):
            self._coordinator.save_together(
                decision.save,
                self._rank,
                lambda: self._save_share(manager, state, self._peers, leaves),
                everywhere=True,
            )
        else:
            self._coordinator.save_together(decision.save, self._rank, lambda: self._save_whole(manager, state))

    def leaves_last(self, state: State) -> None:
        """This worker leaves a run that cannot go on, with the best state there is: it saves alone."""
        manager = self.manager
        if isinstance(manager, ElasticCheckpointManager):
            self._save_share(manager, state, Alone(self._peers.round_number), True)
        elif manager is not None:
            self._save_whole(manager, state)

    def close(self) -> None:
        """The run is over for this worker: wait, for a bounded time, until its last save is done."""
        if isinstance(self.manager, ElasticCheckpointManager):
            self.manager.end_run()

    def _decide(self, manager: CheckpointManager, *, wanted: bool, leaves: bool) -> SaveDecision:
        tiered = manager if isinstance(manager, ElasticCheckpointManager) else None
        return self._schedule.decide(
            self._step,
            wanted=wanted,
            saving=tiered is not None and tiered.is_saving,
            is_full=tiered is not None and tiered.is_full,
            stop_requested=leaves,
        )

    def _save_share(self, manager: ElasticCheckpointManager, state: State, peers: Peers, leaves: bool) -> None:
        self._schedule.began(self._step)
        try:
            manager.save_step(state, self._step, peers, everywhere=leaves, observe=self._schedule.saved)
        except (OSError, RuntimeError):
            log.exception(
                "could not save step %d; training goes on, the checkpoint before stays the latest", self._step
            )
        self._schedule.resumes()

    def _save_whole(self, manager: CheckpointManager, state: State) -> None:
        self._schedule.began(self._step)
        began_s = self._clock()
        try:
            api.save(manager, state)
        except (OSError, RuntimeError):
            # the disk may be full: the last checkpoint stands, and the step that was trained stays trained
            log.exception("could not save a checkpoint; training goes on, the one before stays the latest")
        else:
            took_s = self._clock() - began_s
            self._schedule.saved("durable", stall_s=took_s, durable_s=took_s)
            publish_metric("torchelastic", "checkpoint.stall.duration.ms", 1000 * took_s)
        self._schedule.resumes()
