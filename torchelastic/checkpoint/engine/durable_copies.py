"""Copies in durable storage of checkpoints that lie in the memory of the hosts, made beside the training.

A checkpoint there has the name, the shards and the manifest that it has in memory, so both places count as one: what
one of them lacks is read in the other. Each rank uploads its own shard; rank 0 publishes the manifest when all shards
are there, which it sees at the storage itself: nobody waits for another rank, and nothing stops training.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import tenacity

from torchelastic.checkpoint.engine.background import Background
from torchelastic.checkpoint.engine.schedule import TierSchedules
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.failures import Failures
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.replicas.receive import Destination, digest_of
from torchelastic.checkpoint.replicas.replica_client import Transferred
from torchelastic.checkpoint.store.durable_tier import DurableTier
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.manifest import Manifest
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.checkpoint.store.tier import SealedShard, TierContext, TierEntry
from torchelastic.metrics import publish_metric
from torchelastic.processes.background import in_background
from torchelastic.processes.dropped import let_go_when_dropped
from torchelastic.processes.file_locks import lock_of_nobody
from torchelastic.processes.own_folder import LOCK, OwnFolder

log = logging.getLogger(__name__)

#: For how long rank 0 waits for the shards of the others.
SHARDS_S = 600.0
#: For how long the first save waits for the storage.
ANSWER_S = 10.0
#: It looks for them first after this time, and then ever more rarely.
_FIRST_LOOK_S, _RAREST_LOOK_S = 0.05, 5.0


class Readable(AbstractContextManager[object], Protocol):
    """A shard that somebody holds: a `ShardReader`, say."""

    def view(self) -> memoryview:
        """All of its bytes."""


class DurableCopies:
    """What one rank does for the durable copies of a manager's checkpoints. A failure costs a copy, and no save.

    Used on the training thread, but for `take`, `inventory` and `pull`, which may be called on any.

    Args:
        tier: where they go; of this run alone.
        kind: of the checkpoints.
        marks: a folder of all processes of a program that copy to this tier, in which they see whether another one
            copies. None: there is only this process.
        shards_s: for how long rank 0 waits for the shards of the others.
        monotonic: a clock in seconds that never goes back.
    """

    def __init__(
        self,
        tier: DurableTier,
        kind: Kind,
        *,
        marks: Path | None = None,
        shards_s: float = SHARDS_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        tier.kind = kind
        self._tier = tier
        self._marks = marks
        self._shards_s = shards_s
        self._monotonic = monotonic
        self._schedules = TierSchedules({tier.name: tier.every}, monotonic)
        self._background = Background(monotonic=monotonic)
        self._refused = Failures()  # of what was to be removed
        self._context: TierContext | None = None
        self._is_prepared: TierContext | None = None
        self._replaced = threading.Event()
        self._lock = threading.Lock()
        let_go_when_dropped(self, self._background)

    # --- saving -------------------------------------------------------------------------------------------------------

    def known_epoch(self, run_id: str) -> int:
        """See `Tier`; where the storage does not answer, with a warning, more than any job can have counted up to."""

        def ask() -> int:
            self._tier.require_own()
            return self._tier.known_epoch(run_id)

        asked = in_background(ask, "durable-epoch")
        try:
            if wait([asked], ANSWER_S).done:  # training waits
                return asked.result()
            log.warning("it is unknown what other jobs have saved: %s is silent for %g s", self._tier.where, ANSWER_S)
        except CheckpointError as error:
            log.warning("it is unknown what other jobs have saved: %s", error)
        return int(time.time())

    def enter(self, context: TierContext) -> None:
        """A group saves from now on; what older ones have not completed is given up. Again with the same: nothing."""
        with self._lock:
            if context == self._context:
                return
            self._context = context
            self._replaced.set()
            self._replaced = threading.Event()

    def is_free(self) -> bool:
        """Whether nothing is being copied."""
        return self._background.wait(0.0)

    def is_due(self, step: int) -> bool:
        """Whether this checkpoint is to be copied, by the policy of the tier. On rank 0, if `is_free` on all ranks."""
        return bool(self._schedules.due(step))

    @property
    def tier(self) -> DurableTier:
        """Where they go."""
        return self._tier

    def take(self, shard: ShardId, reader: Readable) -> None:
        """Copies a shard; see `enter`.

        Args:
            shard: which.
            reader: of it, which is closed at the end; until then nobody writes into its memory.
        """
        self._submit(f"{shard}", partial(self._upload, shard, reader))

    def publish(self, manifest: Manifest) -> None:
        """Makes a copy count when all shards are there. On rank 0, after `take`."""
        self._schedules.began(manifest.name.step, [self._tier.name])
        self._submit(f"{manifest.name}", partial(self._publish, manifest, time.monotonic()))

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is being copied, by no process of this program; whether that is so. Not a collective."""
        end_s = self._monotonic() + timeout_s
        if not self._background.wait(timeout_s):
            return False
        while self._is_copying_elsewhere():
            if self._monotonic() >= end_s:
                return False
            time.sleep(_FIRST_LOOK_S)
        return True

    def close(self) -> None:
        """The thread ends when nothing is being copied; it can be used on."""
        self._background.close()

    def _submit(self, what: str, copy: Callable[[TierContext, threading.Event], None]) -> None:
        with self._lock:
            context, replaced = self._context, self._replaced
        if context is None:
            raise ValueError("there is no group that saves: call enter first")
        mark = self._mark()

        def run() -> None:
            try:
                copy(context, replaced)
            except CheckpointError as error:
                publish_metric("torchelastic", "checkpoint.failed", 1)
                log.warning("%s has no durable copy; training goes on: %s", what, error)
            finally:
                if mark is not None:
                    mark.remove()

        self._background.submit(run)

    def _mark(self) -> OwnFolder | None:
        """Tells the other processes of this program that this one copies, until it is removed or this process ends."""
        if self._marks is None:
            return None
        try:
            self._marks.mkdir(parents=True, exist_ok=True)
            return OwnFolder(Path(tempfile.mkdtemp(dir=self._marks)))
        except OSError as error:
            log.warning("other processes of this program do not see that this one copies: %s", error)
            return None

    def _is_copying_elsewhere(self) -> bool:
        for mark in self._marks.glob(f"*/{LOCK}") if self._marks is not None else ():
            with lock_of_nobody(mark) as is_of_nobody:
                if is_of_nobody is False:
                    return True
        return False

    def _prepare(self, context: TierContext, replaced: threading.Event) -> None:
        if replaced.is_set():
            raise CheckpointError("the group that saved it was formed anew")
        if self._is_prepared != context:
            self._tier.prepare(context)
            self._is_prepared = context

    def _upload(self, shard: ShardId, reader: Readable, context: TierContext, replaced: threading.Event) -> None:
        with reader:
            self._prepare(context, replaced)
            with reader.view() as view:
                self._tier.put(SealedShard(shard.name, shard.rank, shard.world_size, view))

    def _publish(self, manifest: Manifest, began_s: float, context: TierContext, replaced: threading.Event) -> None:
        self._prepare(context, replaced)
        try:
            tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(CorruptCheckpointError),  # a shard is missing
                stop=tenacity.stop_after_delay(self._shards_s) | tenacity.stop_when_event_set(replaced),
                wait=tenacity.wait_exponential(_FIRST_LOOK_S, _RAREST_LOOK_S),
                sleep=tenacity.sleep_using_event(replaced),
                reraise=True,
            )(self._tier.commit, manifest)
        except CheckpointError:
            self._tier.abandon(manifest.name)
            raise
        tier, copied_s = self._tier, time.monotonic() - began_s
        publish_metric("torchelastic", f"checkpoint.durable.{tier.name}.duration.ms", 1000 * copied_s)
        log.info("%s is durable in the %s tier after %.2f s", manifest.name, tier.name, copied_s)
        try:
            tier.prune()
            self._refused.succeeded()
        except CheckpointError as error:  # what is saved is saved
            self._refused.say(f"what {manifest.name} has replaced", error, then=" is not removed; it is tried again")

    # --- restoring ----------------------------------------------------------------------------------------------------

    def inventory(self) -> tuple[list[TierEntry], str | None]:
        """What is published there, newest first; or why nobody knows, which is logged."""
        try:
            self._tier.require_own()
            return [replace(entry, place=self._tier.name) for entry in self._tier.inventory()], None
        except CheckpointError as error:
            log.warning("it is unknown what is in durable storage: %s", error)
            return [], str(error)

    def restored(self, step: int) -> None:
        """Training goes on from this step."""
        self._schedules.begin(step)

    def open(self, shard: ShardId) -> ShardReader:
        """Opens a shard; only the parts that are read are downloaded. Raises as `pull`."""
        return self._tier.open(shard.name, shard.rank)

    def pull(self, shard: ShardId, destination: Destination) -> Transferred:
        """Downloads a shard into memory that `destination` returns for its size.

        Raises:
            CorruptCheckpointError: it is missing, or not what was stored.
            CheckpointError: the storage does not answer.
        """
        with self.open(shard) as reader, reader.view() as view:
            destination(view.nbytes)[:] = view
            return Transferred(view.nbytes, digest_of(view), view.nbytes)
