"""What becomes of a share after the training thread has copied it: checksums, then each tier.

The first tiers, up to the one that has the memory for the copies, are written one after the other on the background
thread of the manager. Each later one works on its saves on a thread of its own: object storage that is slow, or does
not answer, holds up no save to the memory of the host. Of the saves that come meanwhile, the newest waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from torchelastic.checkpoint.engine.background import Background
from torchelastic.checkpoint.engine.elastic_state import Observe
from torchelastic.checkpoint.engine.replicas import Replicas
from torchelastic.checkpoint.engine.save_agreement import SaveAgreement, SupersededError
from torchelastic.checkpoint.engine.stages import Staged, Stages
from torchelastic.checkpoint.errors import CheckpointError, NotPublishedError, OutOfStepError
from torchelastic.checkpoint.failures import Failures
from torchelastic.checkpoint.format.copying import PendingCopy
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import SealedShard, Tier, TierContext
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: Where something fails that is no tier; none has such a name.
_SEALING, _MEMORY, _REPLICAS, _REMOVING = "~sealing", "~memory", "~replicas", "~removing "


@dataclass(eq=False)
class TieredSave:
    """One save of this rank, between the copy and its end.

    Attributes:
        name: which checkpoint it is.
        header: of the shard; its checksums still to come.
        staged: where it is built.
        copy: of the bytes; from a GPU it may still be running.
        agreement: with the group.
        tiers: on rank 0: the names of those that take part; None on the others.
        began_s: when it began, by the monotonic clock.
        stall_s: for how long training stood still.
        observe: is called with the costs.
        metrics: what was measured of this state, for the manifest.
        later: the names of the tiers that work on it on a thread of their own, until they are done.
        waiting: of those, the ones that have not begun: whoever takes a name out does it, or gives it up.
        abandoned: the tiers in which it will not be published, as far as is known.
        is_stage_published: whether a tier has made the stage its own, which then comes back by `prune`.
        failure: the first reason for which a tier that takes part does not have it, but for the memory tier.
        failure_in_memory: the same of that one; counts where no other tier has it.
        is_somewhere: whether any tier has it.
        ended: when all of this is over; raises the failure that counts.
    """

    name: SaveId
    header: Header
    staged: Staged
    copy: PendingCopy
    agreement: SaveAgreement
    tiers: list[str] | None
    began_s: float
    stall_s: float
    observe: Observe | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    later: frozenset[str] = frozenset()
    waiting: set[str] = field(default_factory=set)
    uncommitted: list[Tier] = field(default_factory=list)
    is_stage_published: bool = False
    failure: Exception | None = None
    failure_in_memory: Exception | None = None
    is_somewhere: bool = False
    ended: Future[None] = field(default_factory=Future)

    def failed(self, error: Exception) -> None:
        """A tier does not have it."""
        self.failure = self.failure or error

    def begin_in(self, tier: str) -> bool:
        """Whether nobody has begun it in this tier, or given it up there, before; from any thread."""
        try:
            self.waiting.remove(tier)
        except KeyError:
            return False
        return True

    def end(self) -> None:
        """Nothing more is done for it."""
        failure = self.failure or (None if self.is_somewhere else self.failure_in_memory)
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


@contextmanager
def as_exception() -> Iterator[None]:
    """What a tier raises that is no `Exception` would end the thread, and other ranks would wait for this one."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


class Finisher:
    """Finishes saves, beside the training; raises nothing.

    Args:
        tiers: in the order in which they are written.
        stages: in which saves are built.
        failures: hear of what went wrong.
        background: finishes saves in its thread; on it `prepare` and `skip` are called.
        monotonic: a clock in seconds that never goes back.
        replicas: copies what is put into its tier to other hosts; None: there are none.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        stages: Stages,
        failures: Failures,
        background: Background,
        monotonic: Callable[[], float] = time.monotonic,
        replicas: Replicas | None = None,
    ) -> None:
        first = 1 + (tiers.index(stages.tier) if stages.tier is not None else 0)
        self._stages = stages
        self._first, self._later = tuple(tiers[:first]), tuple(tiers[first:])
        self._failures = failures
        self._background = background
        self._monotonic = monotonic
        self._replicas = replicas
        self._unfinished: list[TieredSave] = []
        self._behind: set[str] = set()
        self.threads = {tier.name: Background(monotonic=monotonic) for tier in self._later}

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is nothing to do; false: there is, after that time. Not on one of the threads."""
        until_s = self._monotonic() + timeout_s
        # saves go from the background to the threads of the tiers, and come back to end
        threads = (self._background, *self.threads.values(), self._background)
        return all(thread.wait(max(0.0, until_s - self._monotonic())) for thread in threads)

    def prepare(self, context: TierContext) -> None:
        """A new group: each tier hears of it after the saves of the group before, and before those of this one.

        What a tier has not begun by then no group would publish: it does not wait, in memory, for a tier that hangs.
        """
        for save in [one for one in self._unfinished if one.agreement.context is not context]:
            for tier in self._later:
                self._skip_unbegun(save, tier, NotPublishedError("the group has ended before it was begun"))
        for tier in self._first:
            self._prepare(tier, context)
        if self._replicas is not None:
            self._replicas.fence(context.round)
        for tier in self._later:
            self.threads[tier.name].submit(partial(self._prepare, tier, context))

    def _prepare(self, tier: Tier, context: TierContext) -> None:
        try:
            with as_exception():
                tier.prepare(context)
        except Exception as error:  # noqa: BLE001 - what is put there will fail, and say so
            self._failures.add(f"preparing the {tier.name} tier", error, place=tier.name)

    def begin(self, save: TieredSave) -> None:
        """Publish a save in the tiers that take part, each by the agreement of all ranks; on the training thread."""
        self._unfinished.append(save)
        self._background.submit(lambda: self._run(save))

    def _run(self, save: TieredSave) -> None:
        try:
            shard = self._seal(save)
            self._failures.succeeded(_SEALING)
            save.staged.pool.pin(save.staged.stage)
            chosen = save.agreement.choose_tiers(save.name, save.tiers)
            save.later = frozenset(tier.name for tier in self._later if tier.name in chosen)
            for older in self._unfinished[: self._unfinished.index(save)]:  # else many would wait for a slow tier
                for tier in self._later:
                    if tier.name in chosen:
                        self._skip_unbegun(older, tier, SupersededError(f"{save.name} has come before it was begun"))
            for tier in self._first:
                if tier.name in chosen:
                    self._publish(save, tier, shard)
        except Exception as error:  # noqa: BLE001 - reported; training goes on
            save.failed(error)
            self._failures.add(str(save.name), error, place=_SEALING)
            save.later = frozenset()
            self._post_skipped(save.name, save.agreement, f"{type(error).__name__}: {error}")
        if not save.later:
            self._end(save)
            return
        if save.is_stage_published or save.staged.refused is not None:
            self._keep_warm(save)
        save.waiting.update(save.later)
        for tier in self._later:
            if tier.name in save.later:
                self.threads[tier.name].submit(partial(self._publish_later, save, tier, shard))

    def _publish_later(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        if not save.begin_in(tier.name):
            return
        try:
            save.agreement.begin(save.name, tier.name)
            self._publish(save, tier, shard)
            self._abort(save, tier)
        except (SupersededError, OutOfStepError) as error:
            self._failed(save, tier, error)
        finally:
            self._background.submit(partial(self._done_in, save, tier))

    def _skip_unbegun(self, save: TieredSave, tier: Tier, why_not: NotPublishedError) -> None:
        """In a tier that has not begun with it."""
        if save.begin_in(tier.name):
            self._failed(save, tier, why_not)
            with suppress(OutOfStepError):  # the group has ended: nobody waits
                save.agreement.skip_unbegun(save.name, tier.name, str(why_not))
            self._done_in(save, tier)

    def _failed(self, save: TieredSave, tier: Tier, error: Exception) -> None:
        if not isinstance(error, SupersededError):
            if tier is self._stages.tier:
                save.failure_in_memory = error
            else:
                save.failed(error)
            self._failures.add(f"{save.name} in the {tier.name} tier", error, place=tier.name)
        elif save.agreement.context.rank == 0 and tier.name not in self._behind:
            self._behind.add(tier.name)
            text = "the %s tier is slower than saves come: %s is skipped there (%s); save there more rarely"
            log.warning(text, tier.name, save.name, error)

    def _done_in(self, save: TieredSave, tier: Tier) -> None:
        save.later -= {tier.name}
        if not save.later:
            self._end(save)

    def _end(self, save: TieredSave) -> None:
        try:
            for tier in self._first:  # not before: the memory of what is abandoned may be used by the next save at once
                self._abort(save, tier)
            save.staged.pool.unpin(save.staged.stage)
            if not save.is_stage_published:
                self._release_stage(save)
            self._say_done(save.name, save.agreement)
            save.end()
            self._keep_warm(save)
        finally:
            self._unfinished.remove(save)
            self._background.release()

    def _release_stage(self, save: TieredSave) -> None:
        stage = save.staged.stage
        if stage.has_room_for(save.header):
            self._stages.release(save.staged)
        else:  # it was outgrown, and would be by the saves that follow
            stage.slot.release_at_once()
            save.staged.pool.release_memory(stage)

    def _keep_warm(self, save: TieredSave) -> None:
        if not self._background.is_full:
            try:
                self._stages.keep_warm(save.header)
                self._failures.succeeded(_MEMORY)
            except CheckpointError as error:
                self._failures.add("taking memory for the next save", error, place=_MEMORY)

    def _say_done(self, name: SaveId, agreement: SaveAgreement) -> None:
        try:
            agreement.done()
        except OutOfStepError as error:
            log.debug("no rank is left to be notified that %s is done: %s", name, error)

    def skip(self, name: SaveId, agreement: SaveAgreement, why_not: str) -> None:
        """This rank takes no part in a save, which has not begun here."""
        self._post_skipped(name, agreement, why_not)
        self._say_done(name, agreement)

    def _post_skipped(self, name: SaveId, agreement: SaveAgreement, why_not: str) -> None:
        """To the others, who would wait for this rank."""
        with suppress(OutOfStepError):  # the group has ended: nobody waits
            if agreement.context.rank == 0:
                agreement.choose_tiers(name, [])
            for tier in (*self._first, *self._later):
                agreement.skip(name, tier.name, why_not)

    def _seal(self, save: TieredSave) -> SealedShard:
        save.copy.wait()
        self._stages.seal(save.staged, save.header)
        context, stage = save.agreement.context, save.staged.stage
        return SealedShard(save.name, context.rank, context.world_size, stage.shard, stage)

    def _publish(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        """One tier. A failure is that of this tier: the others go on."""
        try:
            self._put_and_commit(save, tier, shard)
        except Exception as error:  # noqa: BLE001 - reported; training goes on
            self._failed(save, tier, error)
            return
        save.is_somewhere = True
        self._behind.discard(tier.name)
        self._failures.succeeded(tier.name)
        durable_s = self._monotonic() - save.began_s
        publish_metric("torchelastic", f"checkpoint.durable.{tier.name}.duration.ms", 1000 * durable_s)
        if save.observe is not None:
            save.observe(tier.name, stall_s=save.stall_s, durable_s=durable_s)
        log.info("%s is durable in the %s tier after %.2f s", save.name, tier.name, durable_s)
        try:
            if not tier.is_shared or shard.rank == 0:
                with as_exception():
                    tier.prune()
                self._failures.succeeded(_REMOVING + tier.name)
        except Exception as error:  # noqa: BLE001 - what is saved is saved
            what, place = f"removing old checkpoints in the {tier.name} tier", _REMOVING + tier.name
            self._failures.add(what, error, place=place, then=" failed; it is tried again after later saves")

    def _put_and_commit(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        agreement, name = save.agreement, save.name
        save.uncommitted.append(tier)
        self._put(save, tier, shard)
        if shard.rank != 0:
            try:
                manifest = agreement.verdict(name, tier.name)
            except OutOfStepError:
                save.uncommitted.remove(tier)  # rank 0 may have committed it: what is stored here may be needed
                raise
            save.uncommitted.remove(tier)
            if not tier.is_shared:
                with as_exception():
                    tier.commit(manifest)
            return
        try:
            manifest = agreement.gather(name, tier.name, save.metrics, time.time())
            with as_exception():
                tier.commit(manifest)
        except Exception as error:
            with suppress(OutOfStepError):  # the first error is the one to see
                agreement.abort(name, tier.name, error)
            raise
        save.uncommitted.remove(tier)
        with suppress(OutOfStepError):  # the group has ended: nobody listens
            agreement.publish(name, tier.name, manifest)

    def _put(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        agreement, name = save.agreement, save.name
        try:
            if tier is self._stages.tier and save.staged.refused is not None:
                raise save.staged.refused
            with as_exception():
                record = tier.put(shard)
            self._replicate(save, tier, shard)
        except Exception as error:
            why_not = f"rank {shard.rank} could not store its shard: {type(error).__name__}: {error}"
            agreement.stored(name, tier.name, None, why_not)
            if shard.rank == 0:
                with suppress(OutOfStepError, NotPublishedError):  # not before all have stored or given up, see `run`
                    agreement.gather(name, tier.name, {}, 0.0)
                agreement.abort(name, tier.name, NotPublishedError(why_not))
            raise
        finally:
            if not save.is_stage_published:
                path = save.staged.stage.slot.path
                save.is_stage_published = path is not None and path.parent != save.staged.pool.folder
        agreement.stored(name, tier.name, record)

    def _replicate(self, save: TieredSave, tier: Tier, shard: SealedShard) -> None:
        """Before this rank says that it has stored its shard: what is committed has its replicas."""
        if self._replicas is None or tier is not self._replicas.tier:
            return
        try:
            self._replicas.push(shard)
            self._failures.succeeded(_REPLICAS)
        except Exception as error:  # noqa: BLE001 - a replica is one copy more
            self._failures.add(f"the replicas of {save.name}", error, place=_REPLICAS)

    def _abort(self, save: TieredSave, tier: Tier) -> None:
        """Remove what is left of a save that this tier will not have."""
        is_unused = tier is self._stages.tier and save.staged.refused is not None
        if is_unused or tier not in save.uncommitted or (tier.is_shared and save.agreement.context.rank != 0):
            return  # of a shared tier: the others may still be writing there
        try:
            with as_exception():
                tier.abandon(save.name)
        except Exception as error:  # noqa: BLE001 - only left-overs, which a later save removes, or the next group
            what, then = f"what is left of {save.name} in the {tier.name} tier", " is not removed; it is tried again"
            self._failures.say(what, error, place=_REMOVING + tier.name, then=then)
