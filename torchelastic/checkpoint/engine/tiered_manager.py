"""TieredCheckpointManager: every rank saves its share, in the background, to several tiers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from torchelastic.checkpoint.checkpoint_manager import Checkpoint, CheckpointManager
from torchelastic.checkpoint.engine.background import Background
from torchelastic.checkpoint.engine.elastic_state import ElasticState, Observe
from torchelastic.checkpoint.engine.epoch import agree_on_epoch
from torchelastic.checkpoint.engine.finishing import Finisher, TieredSave
from torchelastic.checkpoint.engine.read_rules import PartsWhereTheyAre, ReadRule, WholeOnRank0
from torchelastic.checkpoint.engine.replicas import replicas_of
from torchelastic.checkpoint.engine.save_agreement import SaveAgreement
from torchelastic.checkpoint.engine.schedule import TierSchedules
from torchelastic.checkpoint.engine.stages import Staged, Stages
from torchelastic.checkpoint.engine.streams import (
    STREAMS,
    TREE,
    NewCheckpoint,
    StoredCheckpoint,
    load_restored,
    stored_here,
    streams_of,
)
from torchelastic.checkpoint.engine.tiered_restore import Restored, TieredRestore
from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError
from torchelastic.checkpoint.format.copying import PendingCopy
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.policy import EverySeconds, OnEnd, OnSignal, SavePolicy
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import Tier, TierContext
from torchelastic.errors import UnsavableError
from torchelastic.group.notes import Notes
from torchelastic.group.peers import Alone, Peers
from torchelastic.metrics import publish_metric
from torchelastic.processes.dropped import let_go_when_dropped

log = logging.getLogger(__name__)

#: Lays a shard out, given what its header is to state; see `TieredCheckpointManager.save_shard`.
LayOut = Callable[[Mapping[str, Any]], tuple[Header, Sequence[torch.Tensor]]]
#: At the end of a run a rank is not waited for any more when it has given no sign of life for SILENT_S.
LOOK_S, SILENT_S = 0.5, 10.0


class TieredCheckpointManager(CheckpointManager):
    """Saves a state in several places: this host's memory, disks, durable storage; restores the newest from any.

    Give it to `torchelastic.train(..., checkpoint=manager)`. Every rank makes one with the same arguments. After a step
    that the policy chooses, each rank copies its share of the state into memory (that alone stops the training); the
    rest is done beside it, see `Finisher`. Weights that all ranks hold alike are split, so each writes a part of them.

    It also is a `CheckpointManager` of 0.1: what `create_checkpoint` returns is written by the calling process alone.

    Args:
        tiers: freshest and fastest first: `MemoryTier`, `DiskTier`, `DurableTier`; each with a name of its own.
        policy: when the train loop saves; each tier's `every` may make that rarer for it.
        replicas: on how many other hosts the memory of each rank is copied; needs a `MemoryTier`.
        host: names this host; ranks that give the same name are lost together. Default: the host name.
        run_id: names the run; jobs that go on with each other's checkpoints share it. Default: that of the launcher.
        allow_pickles: save objects that are neither plain values nor tensors as pickles, and read them. Only where
            nobody else can write into the tiers.
        patience_s: how long a save waits for another rank before it is given up.
        grace_s: how long it still waits when the group has changed meanwhile.
        slot_wait_s: how long `save_step` waits where as many saves as may be are not finished.
        end_wait_s: how long the end of the run waits for the last save.
        kind: what the checkpoints are; of other kinds none is loaded or removed.
        monotonic: a clock in seconds that never goes back.

    Attributes:
        tiers: as given.
        policy: as given.
        failures: see `CheckpointManager`; those of the background, too.

    Raises:
        TypeError: a tier or a policy is none.
        ValueError: no tier, two of the same name, or replicas without a memory tier.
    """

    saves_on_every_rank = True

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        policy: SavePolicy | None = EverySeconds(60.0) | OnSignal() | OnEnd(),  # noqa: B008 - a value
        replicas: int = 0,
        host: str | None = None,
        run_id: str | None = None,
        allow_pickles: bool = False,
        patience_s: float = 600.0,
        grace_s: float = 5.0,
        slot_wait_s: float = 60.0,
        end_wait_s: float = 600.0,
        kind: Kind = Kind.TIERED,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(tiers, policy)
        self.tiers = tuple(tiers)
        for tier in self.tiers:
            tier.kind = kind
        self.policy = policy
        self._places = ", ".join(tier.where for tier in self.tiers)
        self._run_id = run_id or os.environ.get("TORCHELASTIC_RUN_ID") or "run"
        self._allow_pickles = allow_pickles
        self._patience_s, self._grace_s = patience_s, grace_s
        self._slot_wait_s, self._end_wait_s = slot_wait_s, end_wait_s
        self._monotonic = monotonic
        self._stages = Stages(self.tiers)
        # each place behind the first may be at work on one save and keep another one waiting; and one more comes
        self._background = Background(max(2, 2 * len(self.tiers) - 1), monotonic=monotonic)
        self._replicas = replicas_of(self.tiers, replicas, host)
        self._finisher = Finisher(self.tiers, self._stages, self.failures, self._background, monotonic, self._replicas)
        self._schedules = TierSchedules({tier.name: tier.every for tier in self.tiers}, monotonic)
        self._layouts: dict[bool | None, RecurringLayout] = {}
        self._epoch: int | None = None
        self._generation, self._nonce = 0, ""
        self._peers: Peers | None = None
        self._agreement: SaveAgreement | None = None
        self._are_prepared = threading.Event()
        threads = (self._background, *self._finisher.threads.values())
        self._dropped = let_go_when_dropped(self, *threads, self._replicas, *self.tiers, self._stages)

    # --- a group ------------------------------------------------------------------------------------------------------

    def enter_group(self, peers: Peers) -> None:
        """A new group: what older ones have not completed is dropped. On the training thread of every rank.

        Raises:
            CheckpointError: a tier cannot be used; on all ranks alike.
            RuntimeError: a peer is lost.
        """
        if self._agreement is not None:
            self._agreement.end(self._grace_s)
        epoch, self._generation, self._nonce = agree_on_epoch(
            self.tiers, peers, self._run_id, self._epoch, self._generation
        )
        if self._replicas is not None:
            self._replicas.enter_group(peers, self._grace_s)
        context = TierContext(self._run_id, epoch, peers.round_number, peers.rank, peers.world_size)
        notes = Notes(peers.mailbox(), self._patience_s, monotonic=self._monotonic)
        self._epoch, self._peers = epoch, peers
        self._agreement = SaveAgreement(context, notes)
        self._background.submit(lambda: self._prepare(context))

    def _prepare(self, context: TierContext) -> None:
        self._finisher.prepare(context)
        self._are_prepared.set()

    # --- restoring ----------------------------------------------------------------------------------------------------

    def restore(self, state: ElasticState, peers: Peers, *, at_most: int | None = None) -> int | None:
        """Set the state of rank 0 from the newest checkpoint that is intact. On the training thread of every rank.

        Returns:
            Its step; None if there is no checkpoint at all, or none of at most so many steps.

        Raises:
            CorruptCheckpointError, CheckpointError, RuntimeError: see `restore_shards`.
        """
        began_s = self._monotonic()
        reading = (PartsWhereTheyAre if state.loads_parts else WholeOnRank0)(self._allow_pickles, at_most)
        restored = self.restore_shards(reading, peers)
        if restored is None:
            if peers.rank == 0 and at_most is None:
                log.info("no checkpoint yet: starting afresh")
            return None
        if state.loads_parts or peers.rank == 0:
            load_restored(state, restored)
        if peers.rank == 0:
            log.info("checkpoint %s loaded from %s", restored.name, ", ".join(restored.tiers))
        peers.barrier()  # it may take its time
        publish_metric("torchelastic", "checkpoint.restore.duration.ms", 1000 * (self._monotonic() - began_s))
        return restored.name.step

    def restore_shards(
        self, reading: ReadRule, peers: Peers, on_damage: Callable[[str], None] | None = None
    ) -> Restored | None:
        """Find the newest checkpoint that is intact, and read it; `restore` with other readers. On every rank.

        Args:
            reading: who wants which shard, and what becomes of it.
            peers: the group.
            on_damage: see `TieredRestore`.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none of them is intact; on every rank.
            CheckpointError: what was saved cannot be read, or `reading` does not take it; on every rank.
            RuntimeError: a peer is lost.
        """
        if not self._finisher.wait(self._patience_s):
            raise CheckpointError(
                f"the save before is not done after {self._patience_s:g} s, so nothing was restored: does one of these "
                f"not answer: {self._places}?"
            )
        restored = TieredRestore(self.tiers, peers, reading, on_damage, self._replicas).run()
        if restored is not None:
            self._schedules.begin(restored.name.step)
        return restored

    # --- saving -------------------------------------------------------------------------------------------------------

    def save_step(
        self,
        state: ElasticState,
        step: int,
        peers: Peers,
        *,
        everywhere: bool = False,
        observe: Observe | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy this rank's share of the state; all else happens in the background. On the training thread, every rank.

        Args:
            state: may change when this returns.
            step: committed steps of the run.
            peers: of the group of the last `enter_group`, or `Alone`.
            everywhere: in every tier, however rarely it takes part else; what rank 0 says counts.
            observe: is called with the costs.
            metrics: what was measured of this state, by name; what rank 0 says counts.

        Raises:
            CheckpointError: there is no memory or no room for the share, or all slots stay busy.
            TypeError: the state holds something that is not saved.
        """

        def lay_out(meta: Mapping[str, Any]) -> tuple[Header, Sequence[torch.Tensor]]:
            pickles = self._takes_pickles_of(state)
            layout = self._layouts.setdefault(pickles, RecurringLayout(allow_pickles=pickles))
            tree, kind = state.checkpoint_tree(), TREE
            if tree is None:
                # streams have no form that recurs
                tree, layout, kind = streams_of(state, peers.rank), RecurringLayout(), STREAMS
            meta, rank, world_size = {"kind": kind, **meta}, peers.rank, peers.world_size
            of_ranks = {"replicated": state.replicated, "own": state.of_each_rank}
            return layout.lay_out(tree, meta, **of_ranks, rank=rank, world_size=world_size)

        self.save_shard(lay_out, step, peers, everywhere=everywhere, observe=observe, metrics=metrics)

    def check_savable(self, state: ElasticState) -> None:
        """Find content that `save_step` could not save, without saving. On every rank.

        Raises:
            UnsavableError: there is such content; names it.
        """
        tree = state.checkpoint_tree()
        if tree is None:
            state.check_savable()
            return
        try:
            flatten(tree, allow_pickles=self._takes_pickles_of(state))
        except (TypeError, ValueError) as error:
            raise UnsavableError(str(error)) from error

    def _takes_pickles_of(self, state: ElasticState) -> bool | None:
        """See `flatten`. What each rank loads a part of is handed on to others, and no pickle is."""
        return None if state.loads_parts else self._allow_pickles

    def save_shard(
        self,
        lay_out: LayOut,
        step: int,
        peers: Peers,
        *,
        everywhere: bool = False,
        observe: Observe | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Future[None]:
        """Copy one shard per rank, however its state is laid out; `save_step` with other states. On every rank.

        Args:
            lay_out: given what the header is to state of the checkpoint, returns the header of this rank's shard,
                without checksums, and the tensors to copy, in the order of its entries.
            step: see `save_step`, as for the rest.
            peers: of the group.
            everywhere: in every tier.
            observe: is called with the costs.
            metrics: for the manifest.

        Returns:
            Done when the save is over on this rank; raises why a tier that takes part does not have it. The memory tier
            only counts where no other one has it.

        Raises:
            CheckpointError: there is no memory for the shard, in the memory tier or beside it, or all slots stay busy.
        """
        began_s = self._monotonic()
        # Every rank counts on, so all give this save the same name without a message. Rank 0 alone chooses the tiers;
        # the others receive its choice in the background (None here).
        agreement, name = self._next_save(step, peers)
        tiers = self._schedules.due(step, everywhere=everywhere) if peers.rank == 0 else None
        # All that the training waits for: a slot, memory, and the start of the copy out of the state's tensors.
        try:
            header, staged, copy = self._copied(lay_out, name, peers)
        except BaseException as error:
            # the others would wait for this rank's shard: they are told in the background, as it takes messages
            why = f"rank {peers.rank}: {type(error).__name__}: {error}"
            self._background.submit(lambda: self._finisher.skip(name, agreement, why))
            raise
        self._schedules.began(step, tiers or ())
        stall_s = self._monotonic() - began_s
        publish_metric("torchelastic", "checkpoint.stall.duration.ms", 1000 * stall_s)
        # From here in the background: checksums, then each tier stores the shard, and publishes once all ranks have.
        save = TieredSave(name, header, staged, copy, agreement, tiers, began_s, stall_s, observe, metrics or {})
        self._finisher.begin(save)
        return save.ended

    def abort_save(self, step: int, peers: Peers) -> None:
        """Tell the other ranks that rank 0 does not save this step: the group broke while rank 0 announced the save.

        Ranks that have heard the announcement would wait for rank 0 otherwise. On the training thread of rank 0. Like
        them it keeps a slot until then, so that none of them waits for a free slot while rank 0 has one.

        Args:
            step: which was announced.
            peers: the group that broke.
        """
        agreement, name = self._next_save(step, peers)
        if holds_slot := not self._background.is_full:
            self._background.reserve(name, self._slot_wait_s)

        def skip() -> None:
            try:
                self._finisher.skip(name, agreement, "the group has broken before it began")
            finally:
                if holds_slot:
                    self._background.release()

        self._background.submit(skip)

    call_off = abort_save
    """The name that it had first: 1.1.0 has it no more."""

    def _next_save(self, step: int, peers: Peers) -> tuple[SaveAgreement, SaveId]:
        agreement = self.join(peers)
        self._generation += 1  # on every rank, whatever happens to this one now
        return agreement, SaveId(*agreement.context.token, self._generation, step, self._nonce)

    def join(self, peers: Peers) -> SaveAgreement:
        """`enter_group`, unless this is the group of the last one."""
        if self._agreement is None or peers is not self._peers:
            self.enter_group(peers)
        assert self._agreement is not None
        return self._agreement

    def _copied(self, lay_out: LayOut, name: SaveId, peers: Peers) -> tuple[Header, Staged, PendingCopy]:
        """All that stops the training. Takes a slot of the background, which is freed when the save is finished."""
        self._background.reserve(name, self._slot_wait_s)
        try:
            header, sources = lay_out(ShardId(name, peers.rank, peers.world_size).stated)
            staged = self._stage_for(header)
            try:
                copy = staged.stage.copy_beside(sources, just_laid_out=True)
                copy.hold()
            except BaseException:
                staged.pool.release(staged.stage)
                raise
        except BaseException:
            self._background.release()
            raise
        return header, staged, copy

    def _stage_for(self, header: Header) -> Staged:
        """Memory for a share; kept ready by the background, but for the first one and where the state has changed."""
        if not self._are_prepared.wait(self._slot_wait_s):
            raise CheckpointError(
                f"the tiers are not prepared after {self._slot_wait_s:g} s: does one of these not answer: "
                f"{self._places}?"
            )
        return self._stages.take(header)

    # --- in the background --------------------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether a save still runs in the background."""
        return self._background.is_working

    @property
    def is_full(self) -> bool:
        """Whether one more save would have to wait."""
        return self._background.is_full

    def wait(self, timeout_s: float | None = None, *, everywhere: bool = True) -> bool:
        """Wait until all saves are done or given up, and return whether they are.

        Args:
            timeout_s: for how long; None: `end_wait_s`.
            everywhere: also in the tiers that work on a thread of their own.
        """
        timeout_s = self._end_wait_s if timeout_s is None else timeout_s
        until_s, is_said = self._monotonic() + timeout_s, False
        waits = self._finisher if everywhere else self._background
        while not waits.wait(max(0.0, min(LOOK_S, until_s - self._monotonic()))):
            if self._monotonic() >= until_s:
                log.warning("a checkpoint is still not finished after %g s", timeout_s)
                return False
            if not is_said and self._monotonic() >= until_s - timeout_s + SILENT_S:
                is_said = True
                text = "waiting for unfinished saves, for at most %g s in all: does one of these not answer: %s?"
                log.warning(text, timeout_s, self._places)
            if self._agreement is not None and self._peers is not None:  # no group follows that would end this one
                silent_s = self._peers.silent_s()
                self._agreement.lose([rank for rank in silent_s if silent_s[rank] > SILENT_S])
        if self._agreement is not None:
            self._agreement.lose(())  # it was a guess: who was silent may take part in the next save
        return True

    def end_run(self) -> None:
        """The run is over for this worker: wait, for a bounded time, until its last save is done everywhere."""
        agreement = self._agreement
        if self.wait() and agreement is not None:
            self._background.submit(lambda: self._wait_for_ranks(agreement))
            self.wait()

    def _wait_for_ranks(self, agreement: SaveAgreement) -> None:
        try:
            agreement.wait_for_ranks(self._grace_s)
        except OutOfStepError as error:
            log.info("the last save: %s", error)

    def close(self) -> None:
        """Wait as `wait` does, and let go of memory and locks; what is stored stays. The manager is of no use then."""
        self.wait()
        self._dropped()

    # --- as a manager of 0.1 ------------------------------------------------------------------------------------------

    def create_checkpoint(self) -> Checkpoint:
        """A checkpoint of named streams, written by this process alone and durable after `commit`."""
        return NewCheckpoint(self._save_streams)

    def list_checkpoints(self) -> Sequence[StoredCheckpoint]:
        """The complete checkpoints that can be read from this host, newest first."""
        return [one for one in self.list_candidates() if one.damage is None]

    def list_candidates(self) -> Sequence[StoredCheckpoint]:
        """Those, and those of which something here is damaged, newest first."""
        return stored_here(self.tiers, allow_pickles=self._allow_pickles)

    def get_latest_checkpoint(self) -> StoredCheckpoint | None:
        """The newest of them."""
        return next(iter(self.list_checkpoints()), None)

    def get_checkpoint(self, sequence_id: int) -> StoredCheckpoint | None:
        """The newest of them that was taken at this step; streams count as a step each."""
        return next((one for one in self.list_checkpoints() if one.sequence_id == sequence_id), None)

    def _save_streams(self, streams: Mapping[str, bytes]) -> None:
        if self._agreement is not None and self._agreement.context.world_size > 1:
            raise CheckpointError(
                "this manager saves together with a group: use save_step, or another manager for what one rank saves"
            )
        newest = next(iter(stored_here(self.tiers)), None)
        step = 0 if newest is None else newest.sequence_id + 1
        ended = self.save_shard(
            lambda meta: RecurringLayout().lay_out(streams, {"kind": STREAMS, **meta}), step, self._peers or Alone()
        )
        if not self._finisher.wait(self._patience_s):
            raise CheckpointError(
                f"the checkpoint is not saved everywhere after {self._patience_s:g} s: does one of these not answer: "
                f"{self._places}?"
            )
        if (error := ended.exception()) is not None:
            raise CheckpointError(f"the checkpoint was not saved everywhere: {error}") from error


def _check(tiers: Sequence[Tier], policy: object) -> None:
    """Raises what the constructor raises for what is no place, and what cannot decide: a path, and a number, say."""
    if not isinstance(tiers, Sequence) or not all(isinstance(tier, Tier) for tier in tiers):
        raise TypeError(
            f"tiers is {tiers!r}: give a list of tiers, such as [MemoryTier('/dev/shm/my-job'), DiskTier('folder')]"
        )
    names = [tier.name for tier in tiers]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"the tiers are named {names}: give at least one, each with a name of its own")
    of_tiers = [(f"{name} of {tier.name!r}", getattr(tier, name)) for tier in tiers for name in ("keep", "every")]
    for what, given in (("policy", policy), *of_tiers):
        if given is not None and not hasattr(given, "decide"):
            raise TypeError(f"{what} is {given!r}: give a policy, such as EverySteps(1000), or KeepLast(3) for keep")
