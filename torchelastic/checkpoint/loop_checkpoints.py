"""What the train loop does about checkpoints: when it saves and loads, on which ranks, and through which manager."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

from torchelastic.checkpoint import checkpoint_manager
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.checkpoint.engine.schedule import SaveSchedule
from torchelastic.checkpoint.failures import Failures, is_of_save
from torchelastic.checkpoint.policy import SaveDecision, SavePolicy
from torchelastic.errors import ComputeCheckError, UnsavableError
from torchelastic.group.peers import Alone, Peers
from torchelastic.group.rollback import Rollback
from torchelastic.loop_observer import LoopObserver
from torchelastic.metrics import publish_metric
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url

if TYPE_CHECKING:
    from torchelastic.checkpoint.engine.tiered_manager import TieredCheckpointManager
    from torchelastic.coordinator import Coordinator
    from torchelastic.state import State

log = logging.getLogger(__name__)

#: What the place is called to which a manager without tiers saves.
ONLY_TIER = "durable"
#: What was restored is durable somewhere.
_RESTORED = ""

#: Rank 0 is waited for so long, and so many times as long as the slowest save so far; the first one has no bound.
MIN_BOUND_S, BOUND_FACTOR = 300.0, 10.0

#: What rank 0 says after a step. `_AT_END`: to save it if the run ends with it.
_GO_ON, _SAVE, _AT_END = range(3)

_NOT_ASKED = SaveDecision(False, "rank 0 decides")


class LoopCheckpoints(LoopObserver):
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
        if isinstance(given, SavePolicy) and checkpoint_manager.get_checkpoint_manager() is None:
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
        self._durable: dict[str, int] = {}  # the newest step, by tier
        self._tried_step = -1
        self._was_loaded = self._synced_before = False
        self._owes_save = False  # of what the run has gone back to, which is to count as the newest
        self._saves_at_end = False  # the step that was committed last, if no other follows
        self._has_ended = False
        self._slowest_s: float | None = None
        self._failures = Failures()
        self._begins = False  # whether nobody has progress in this group
        self._tried_content = -1  # of which it is known whether it can be saved, by `State.content_changes`

    def check(self, state: State) -> None:
        """Find a state that this manager cannot save, before anything is trained.

        Raises:
            TypeError: no rank can hold the whole state, and this manager saves what one rank holds.
            ValueError: the state may go back to an older checkpoint, and this manager does not find one by its step.
        """
        manager = self.manager
        if state.rollback is not None and not _is_tiered(manager):
            raise ValueError(
                'ComputeCheck(on_wrong="restore") goes back to an older checkpoint: give train() a '
                "TieredCheckpointManager, which finds one by its step; or take another on_wrong"
            )
        if state.loads_parts and manager is not None and not _is_tiered(manager):
            raise TypeError(
                f"the checkpoint manager is a {type(manager).__name__}, to which one rank writes the whole state, and "
                f"of a {type(state).__name__} no rank has the whole: give a TieredCheckpointManager, to which every "
                "rank writes its parts"
            )

    @property
    def step(self) -> int:
        """Committed steps of the run, as far as it is known here."""
        return self._step

    @property
    def restored_step(self) -> int | None:
        """That of the checkpoint in tiers that the state is from, as long as no step has been committed since."""
        return self._step if _is_tiered(self.manager) and self._durable.get(_RESTORED) == self._step else None

    @property
    def saved_step(self) -> int | None:
        """The newest step that is durable somewhere, as far as this rank knows; None: none."""
        return max(self._durable.values(), default=None)

    @property
    def save_times_s(self) -> Mapping[str, tuple[float, ...]]:
        """How long the newest saves took until they were durable, by tier, the most durable one first.

        A manager of 0.1 has one tier; without a manager there is none.
        """
        manager, costs = self.manager, self._schedule.costs
        if manager is None:
            return {}
        known = {tier.name: costs.of(tier.name) for tier in reversed(getattr(manager, "tiers", ()))}
        if not known:
            known[ONLY_TIER] = max(costs.tiers.values(), key=lambda cost: cost.durable_s, default=None)
        return {name: () if cost is None else cost.recent_durable_s for name, cost in known.items()}

    @property
    def manager(self) -> CheckpointManager | None:
        """Who saves; None: nobody."""
        return self._given if self._given is not None else checkpoint_manager.get_checkpoint_manager()

    # --- a group ------------------------------------------------------------------------------------------------------

    def enter_group(self, state: State, rank: int) -> None:
        """A group has formed: load a checkpoint if nobody has progress. Every rank calls it, before the sync.

        Args:
            state: is set on rank 0 only; the sync sends it to the others.
            rank: of this worker.
        """
        self._rank = rank
        manager, is_wanted = self.manager, self._coordinator.nobody_has_progress()
        self._begins = not self._synced_before if is_wanted is None else is_wanted
        if manager is not None and rank == 0:
            self._take_over(manager)
        if _is_tiered(manager):
            is_loaded = self._enter_with_all(manager, state, is_wanted)
        else:
            is_loaded = manager is not None and rank == 0 and self._begins and self._loaded(manager, state)
        if is_wanted and not is_loaded and rank == 0:
            self._say_what_is_lost()

    def _loaded(self, manager: CheckpointManager, state: State) -> bool:
        """Load what a manager of 0.1 has saved, if it has."""
        loaded = checkpoint_manager.load_latest(manager, state)
        if loaded is not None:
            self._schedule.began(self._step)
            self._was_loaded = True
        log.info("checkpoint %s loaded", loaded) if loaded else log.info("no checkpoint yet: starting afresh")
        return loaded is not None

    def _say_what_is_lost(self) -> None:
        """A process that was in no group before leads a later one: whoever was in an earlier one has ended."""
        peers = self._coordinator.peers()
        if peers is not None and peers.round_number > 1 and not self._synced_before:
            log.warning(
                "round %d: no worker has a state of an earlier round, and there is no checkpoint: the run begins at "
                "step 0, and what was trained before is lost. A checkpoint manager (docs/checkpoint.md) would keep it",
                peers.round_number,
            )

    def _take_over(self, manager: CheckpointManager) -> None:
        """A rank 0 of an older group that is only paused must not publish what it was saving."""
        run_id = _run_id_of(self._coordinator)
        if run_id and not _is_tiered(manager):  # those have the round in every name
            try:
                manager.take_over(run_id)
            except Exception as error:  # noqa: BLE001 - a full disk may have room again when the next save is due
                log.warning("a paused worker of an older group may still publish a checkpoint: %s", error)

    def _enter_with_all(self, manager: TieredCheckpointManager, state: State, is_wanted: bool | None) -> bool:
        self._peers = self._coordinator.peers() or Alone()
        if self._peers.world_size == 1 and self._rank != 0:
            return False  # the group is not known: rank 0 does it all
        rollback = state.rollback or Rollback()
        own = [self._step, self._synced_before, self._owes_save, self._saves_at_end, *rollback.words]
        said = self._peers.all_gather(own)
        self._step, source_was_level, *_ = said[0]
        manager.enter_group(self._peers)
        self._begins = not source_was_level if is_wanted is None else is_wanted
        goes_back = self._begins and rollback.agree([row[4:] for row in said])
        # also where the group broke before that was saved, and who is new does not know
        self._owes_save = goes_back or any(row[2] for row in said)
        self._saves_at_end = not self._begins and bool(said[0][3])
        if self._begins:
            restored = manager.restore(state, self._peers, at_most=rollback.at_most)
            if restored is not None:
                if goes_back:
                    self._durable.clear()
                self._step = self._durable[_RESTORED] = restored
                self._schedule.began(restored)
                return True
            if goes_back:
                raise ComputeCheckError(
                    f"a worker computed wrong, and there is no checkpoint of at most {rollback.at_most} steps to go "
                    "back to, so weights may be wrong: start the run anew without that worker's host; to go on with "
                    'these weights instead, take on_wrong="leave"'
                )
        return False

    def in_sync(self, state: State) -> None:
        """From here on all ranks count the same steps.

        Raises:
            UnsavableError: the run begins, and what the state holds cannot be saved.
        """
        self._synced_before = True
        self._tried_content = -1 if self._begins else state.content_changes
        if self._begins:
            self._try_content(state)
        step = getattr(state, "step", None)
        if type(step) is int and step >= 0:
            self._step = step
        if self._was_loaded:
            self._durable[_RESTORED] = self._step
            self._was_loaded = False
        self._schedule.enter_group(self._step)
        if self._owes_save:
            self._save_as_newest(state)

    def failed(self) -> None:
        """A step or a group has failed."""
        self._schedule.failed("process")

    def _save_as_newest(self, state: State) -> None:
        """What the run has gone back to is its newest checkpoint from here on, and not what was saved after that."""
        manager = self.manager
        if _is_tiered(manager):
            with self._coordinator.saving():
                self._save_share(manager, state, self._peers, True)
        self._owes_save = False

    def _try_content(self, state: State) -> None:
        """Whether what the state holds can be saved: at the start of a run nothing is lost by refusing it.

        Whatever else fails (a `state_dict` of the user's that is not ready yet) may go well when a save is due.
        """
        manager = self.manager
        if manager is None:
            return
        try:
            manager.check_savable(state) if _is_tiered(manager) else state.check_savable()
        except UnsavableError as error:
            if self._begins:
                raise UnsavableError(
                    f"no checkpoint could be taken of this state, so the run is refused: {error}; or give train() no "
                    "checkpoint manager"
                ) from error
            then = ": no checkpoint can be taken of this state; training goes on, the one before stays the latest"
            self._failures_of(manager).say(f"step {self._step}", error, then=then)
        except Exception as error:  # noqa: BLE001 - of the user's own code
            log.warning(
                "step %d: it is not known whether this state can be saved, since trying failed: %s: %s",
                self._step, type(error).__name__, error,
            )  # fmt: skip

    # --- saving -------------------------------------------------------------------------------------------------------

    def step_committed(self) -> None:
        """One more step counts."""
        self._step += 1
        self._schedule.step_ended()

    def after_step(self, state: State, *, on_trial: bool = False) -> None:
        """Save if it is due; every rank calls it after the same committed step.

        Args:
            state: to save.
            on_trial: save to every tier in any case, so that it is known how long that takes; what rank 0 says counts.

        Raises:
            UnsavableError: it was the first step of the run, and the state has got content that cannot be saved.
        """
        manager = self.manager
        if manager is None:
            return
        if state.content_changes != self._tried_content:
            self._tried_content = state.content_changes
            self._try_content(state)
        wanted = self._coordinator.should_save_checkpoint() or state.should_save_checkpoint(self._rank)
        leaves = self._coordinator.somebody_leaves()
        decision = self._decide(manager, wanted=wanted, leaves=leaves) if self._rank == 0 else _NOT_ASKED
        self._begins = False
        if on_trial and self._rank == 0:
            decision = SaveDecision(True, "a deadline is known, and not yet how long a save takes")
        if decision:
            log.info("step %d: saving: %s", self._step, decision.because)
        said = self._rank_0_says(_SAVE if decision.save else _AT_END if self._schedule.is_due_at_end else _GO_ON)
        self._saves_at_end = said == _AT_END
        if said != _SAVE:
            return
        with self._coordinator.saving():
            if _is_tiered(manager):
                self._save_share(manager, state, self._peers, leaves or on_trial)
            else:
                self._save_on_rank_0(manager, state)

    def save_last(self, state: State, patience_s: float) -> tuple[str, ...]:
        """Save the step that was committed last, to every tier, and wait; every rank calls it after that step.

        Does nothing if rank 0 finds that it is durable everywhere, or somewhere after it was tried before.

        Args:
            state: to save.
            patience_s: how long to wait until an elastic manager's save is durable.

        Returns:
            The tiers in which it is durable. On other ranks than 0 a manager of 0.1 does not know it.

        Raises:
            RuntimeError: a peer is lost.
        """
        manager = self.manager
        saved_in, tried_before = self._saved_in(), self._tried_step == self._step
        is_due = not saved_in if tried_before else not set(self.save_times_s) <= set(saved_in)
        self._tried_step = self._step
        if manager is None or not self._rank_0_says(is_due):
            return self._saved_in()
        with self._coordinator.saving():
            if _is_tiered(manager):
                self._save_share(manager, state, self._peers, True)
                if manager.wait(patience_s):
                    manager.end_run()  # rank 0, which has the notes of all, waits until they were read
            else:
                self._save_on_rank_0(manager, state)
        return self._saved_in()

    def save_alone(self, state: State) -> None:
        """Save the step that was committed last, without a group: no other has a better state, and it may be lost."""
        manager = self.manager
        if _is_tiered(manager):
            self._save_share(manager, state, Alone(self._peers.round_number), True)
        elif manager is not None:
            self._take_over(manager)
            self._save_whole(manager, state)

    def run_ended(self, state: State) -> None:
        """No step follows: save the last one, to every tier, if that is due. Every rank calls it, in no group any more.

        `over` waits for it.
        """
        manager, is_due = self.manager, self._saves_at_end and not self._has_ended
        self._saves_at_end = False
        if not is_due or manager is None:
            return
        log.info("step %d: saving: the run has ended", self._step)
        if _is_tiered(manager):
            manager.wait(everywhere=False)
            self._save_share(manager, state, self._peers, True)
        elif self._rank == 0:
            self._save_whole(manager, state)

    def over(self) -> None:
        """Wait, for a bounded time, for saves that still run in the background: with the process they would end."""
        manager = self.manager
        if _is_tiered(manager) and not self._has_ended:
            manager.end_run()
        peers = self._coordinator.peers()
        if peers is not None:
            peers.close()

    def stop_waiting(self) -> None:
        """The time is over: `over` waits for nothing any more."""
        self._has_ended = True

    def _decide(self, manager: CheckpointManager, *, wanted: bool, leaves: bool) -> SaveDecision:
        tiered = manager if _is_tiered(manager) else None
        try:
            return self._schedule.decide(
                self._step,
                wanted=wanted,
                saving=tiered is not None and tiered.is_saving,
                is_full=tiered is not None and tiered.is_full,
                stop_requested=leaves,
            )
        except Exception as error:
            if self._begins:  # a policy of the user's that cannot be asked at all
                raise
            self._failures_of(manager).add("asking the policy when to save", error)
            return SaveDecision(False, "the policy has failed")

    def _rank_0_says(self, what: int) -> int:
        """What rank 0 has found due (`_SAVE`, say); rank 0 alone does it where the group is not known."""
        peers, manager = self._coordinator.peers(), self.manager
        if peers is None:
            return what if self._rank == 0 else _GO_ON
        try:
            return peers.rank_0_says(what)
        except RuntimeError:
            if what == _SAVE and self._rank == 0 and _is_tiered(manager):
                manager.abort_save(self._step, self._peers)
            raise

    def _save_on_rank_0(self, manager: CheckpointManager, state: State) -> None:
        """The others go on when it is durable: what follows may change what is being written."""
        began_s = self._clock()
        if self._rank == 0:
            self._save_whole(manager, state)
        bound_s = None if self._slowest_s is None else max(MIN_BOUND_S, BOUND_FACTOR * self._slowest_s)
        (self._coordinator.peers() or Alone()).wait_for_rank_0("to save a checkpoint", bound_s)
        self._slowest_s = max(self._slowest_s or 0.0, self._clock() - began_s)

    def _save_share(self, manager: TieredCheckpointManager, state: State, peers: Peers, leaves: bool) -> None:
        self._schedule.began(self._step)
        try:
            observe, metrics = partial(self._saved, self._step), state.checkpoint_metrics()
            manager.save_step(state, self._step, peers, everywhere=leaves, observe=observe, metrics=metrics)
        except BaseException as error:  # noqa: BLE001 - what was trained stays trained, whatever a save raises
            self._failed(manager, error)
        else:
            self._failures_of(manager).succeeded()
        self._schedule.resumes()

    def _save_whole(self, manager: CheckpointManager, state: State) -> None:
        self._schedule.began(self._step)
        began_s = self._clock()
        try:
            checkpoint_manager.save(manager, state)
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(manager, error)
        else:
            took_s = self._clock() - began_s
            self._failures_of(manager).succeeded()
            self._saved(self._step, ONLY_TIER, stall_s=took_s, durable_s=took_s)
            publish_metric("torchelastic", "checkpoint.stall.duration.ms", 1000 * took_s)
        self._schedule.resumes()

    def _failed(self, manager: CheckpointManager, error: BaseException) -> None:
        if not is_of_save(error):
            raise error
        then = "; training goes on, the checkpoint before stays the latest"
        self._failures_of(manager).add(f"could not save step {self._step}", error, then=then)

    def _failures_of(self, manager: CheckpointManager) -> Failures:
        """Those of the manager, or of this loop where a manager of the user's has something else by that name."""
        kept = getattr(manager, "failures", None)
        return kept if isinstance(kept, Failures) else self._failures

    def _saved_in(self) -> tuple[str, ...]:
        """The tiers in which the step that was committed last is durable, as far as this rank knows."""
        return tuple(tier for tier, step in tuple(self._durable.items()) if step == self._step and tier != _RESTORED)

    def _saved(self, step: int, tier: str, *, stall_s: float, durable_s: float) -> None:
        """A step is durable in a tier; from any thread."""
        self._durable[tier] = step
        self._schedule.saved(tier, stall_s=stall_s, durable_s=durable_s)


def _run_id_of(coordinator: Coordinator) -> str:
    """Names the run of the workers; "" for one without a name, whose workers cannot replace each other."""
    try:
        return parse_url(str(getattr(coordinator, "init_method", ""))).run_id
    except RendezvousUrlError:
        return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _is_tiered(manager: CheckpointManager | None) -> TypeGuard[TieredCheckpointManager]:
    """Whether every rank saves its share; asked without torch, which that manager imports."""
    return manager is not None and manager.saves_on_every_rank
