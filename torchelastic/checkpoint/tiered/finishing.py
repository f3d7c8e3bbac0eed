"""What becomes of a share after the training thread has copied it: checksums, then each tier in its order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError
from torchelastic.checkpoint.shards.copying import Pending
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.pool import SlotPool
from torchelastic.checkpoint.shards.stage import Stage
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import SealedShard, Tier
from torchelastic.checkpoint.tiered.agreement import NotPublishedError, SaveAgreement
from torchelastic.checkpoint.tiered.api import Observe
from torchelastic.checkpoint.tiered.replicas import Replicas
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: How many failures are remembered.
MAX_FAILURES = 20


class Failures(deque[str]):
    """The latest failures of the background, oldest first, in words; each is logged and counted."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_FAILURES)

    def add(self, what: str, error: Exception) -> None:
        """Something has failed; training goes on."""
        self.append(f"{what}: {error}")
        publish_metric("torchelastic", "checkpoint.failed", 1)
        if isinstance(error, (NotPublishedError, OutOfStepError)):
            log.warning("%s is not published: %s", what, error)
        elif isinstance(error, CheckpointError):  # says all that is to be said
            log.error("%s failed; training goes on: %s", what, error)
        else:
            log.error("%s failed; training goes on", what, exc_info=error)


@dataclass
class TieredSave:
    """One save of this rank, between the copy and its end.

    Attributes:
        name: which checkpoint it is.
        header: of the shard; its checksums still to come.
        stage: holds the bytes.
        copy: of them; from a GPU it may still be running.
        pool: where the stage goes back to.
        agreement: with the group.
        tiers: on rank 0: the names of those that take part; None on the others.
        began_s: when it began, by the monotonic clock.
        stall_s: for how long training stood still.
        observe: is called with the costs.
        metrics: what was measured of this state, for the manifest.
        abandoned: the tiers in which it will not be published, as far as is known.
        is_stage_published: whether a tier has made the stage its own, which then comes back by `prune`.
        failure: the first reason for which a tier that takes part does not have it; None: all of them have it.
        ended: when all of this is over; raises `failure`.
    """

    name: SaveId
    header: Header
    stage: Stage
    copy: Pending
    pool: SlotPool
    agreement: SaveAgreement
    tiers: list[str] | None
    began_s: float
    stall_s: float
    observe: Observe | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    abandoned: list[Tier] = field(default_factory=list)
    is_stage_published: bool = False
    failure: Exception | None = None
    ended: Future[None] = field(default_factory=Future)

    def failed(self, error: Exception) -> None:
        """A tier does not have it."""
        self.failure = self.failure or error

    def end(self) -> None:
        """Nothing more is done for it."""
        if self.failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self.failure)


class Finisher:
    """Finishes saves, on the background thread; raises nothing.

    Args:
        tiers: in the order in which they are written.
        failures: hear of what went wrong.
        monotonic: a clock in seconds that never goes back.
        replicas: copies what is put into its tier to other hosts; None: there are none.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        failures: Failures,
        monotonic: Callable[[], float] = time.monotonic,
        replicas: Replicas | None = None,
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._failures = failures
        self._monotonic = monotonic
        self._replicas = replicas

    def run(self, save: TieredSave) -> None:
        """Publish a save in the tiers that take part, each by the agreement of all ranks."""
        try:
            shard = self._seal(save)
            for name in save.agreement.choose_tiers(save.name, save.tiers):
                self._publish(save, self._tiers[name], shard)
        except Exception as error:  # noqa: BLE001 - reported; training goes on
            save.failed(error)
            self._failures.add(str(save.name), error)
        finally:
            # not before: the memory of what is abandoned may be used by the next save at once
            for tier in save.abandoned:
                if not tier.is_shared or save.agreement.context.rank == 0:  # the others may still be writing there
                    self._abandon(save, tier)
            if not save.is_stage_published:
                save.pool.give_back(save.stage)
            self._say_done(save)
            save.end()

    def _say_done(self, save: TieredSave) -> None:
        try:
            save.agreement.done(save.name)
        except OutOfStepError as error:
            log.debug("nobody is there to hear that %s is done: %s", save.name, error)

    def decline(self, name: SaveId, agreement: SaveAgreement, why_not: str) -> None:
        """This rank takes no part in a save: tell the others, who would wait for it."""
        with suppress(OutOfStepError):  # the group has ended: nobody waits
            if agreement.context.rank == 0:
                agreement.choose_tiers(name, [])
            for tier in self._tiers:
                agreement.stored(name, tier, None, why_not)

    def _seal(self, save: TieredSave) -> SealedShard:
        save.copy.wait()
        save.stage = save.pool.seal(save.stage, save.header)
        context = save.agreement.context
        return SealedShard(save.name, context.rank, context.world_size, save.stage.shard, save.stage)

    def _publish(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        """One tier. A failure is that of this tier: the others go on."""
        try:
            self._put_and_commit(save, tier, shard)
        except Exception as error:  # noqa: BLE001 - reported; training goes on
            save.failed(error)
            self._failures.add(f"{save.name} in the {tier.name} tier", error)
            return
        durable_s = self._monotonic() - save.began_s
        publish_metric("torchelastic", f"checkpoint.durable.{tier.name}.duration.ms", 1000 * durable_s)
        if save.observe is not None:
            save.observe(tier.name, stall_s=save.stall_s, durable_s=durable_s)
        log.info("%s is durable in the %s tier after %.2f s", save.name, tier.name, durable_s)
        try:
            if not tier.is_shared or shard.rank == 0:
                tier.prune()
        except Exception as error:  # noqa: BLE001 - what is saved is saved
            self._failures.add(f"removing old checkpoints in the {tier.name} tier", error)

    def _put_and_commit(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        agreement, name = save.agreement, save.name
        save.abandoned.append(tier)
        self._put(save, tier, shard)
        if shard.rank != 0:
            try:
                manifest = agreement.hear(name, tier.name)
            except OutOfStepError:
                save.abandoned.remove(tier)  # rank 0 may have committed it: what is stored here may be needed
                raise
            save.abandoned.remove(tier)
            if not tier.is_shared:
                tier.commit(manifest)
            return
        try:
            manifest = agreement.gather(name, tier.name, save.metrics, time.time())
            tier.commit(manifest)
        except Exception as error:
            with suppress(OutOfStepError):  # the first error is the one to see
                agreement.publish(name, tier.name, None, f"{type(error).__name__}: {error}")
            raise
        save.abandoned.remove(tier)
        with suppress(OutOfStepError):  # the group has ended: nobody listens
            agreement.publish(name, tier.name, manifest)

    def _put(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        agreement, name = save.agreement, save.name
        try:
            record = tier.put(shard)
            self._replicate(save, tier, shard)
        except Exception as error:
            why_not = f"rank {shard.rank} could not store its shard: {type(error).__name__}: {error}"
            agreement.stored(name, tier.name, None, why_not)
            if shard.rank == 0:
                with suppress(OutOfStepError, NotPublishedError):  # not before all have stored or given up, see `run`
                    agreement.gather(name, tier.name, {}, 0.0)
                agreement.publish(name, tier.name, None, why_not)
            raise
        finally:
            path = save.stage.slot.path
            save.is_stage_published = path is not None and path.parent != save.pool.folder
        agreement.stored(name, tier.name, record)

    def _replicate(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        """Before this rank says that it has stored its shard: what is committed has its replicas."""
        if self._replicas is None or tier is not self._replicas.tier:
            return
        try:
            self._replicas.push(shard)
        except Exception as error:  # noqa: BLE001 - a replica is one copy more
            self._failures.add(f"the replicas of {save.name}", error)

    def _abandon(self, save: TieredSave, tier: Tier) -> None:
        try:
            tier.abandon(save.name)
        except Exception as error:  # noqa: BLE001 - only left-overs, which the next group removes
            because = str(error) or type(error).__name__
            log.warning("could not remove what is left of %s in the %s tier: %s", save.name, tier.name, because)
