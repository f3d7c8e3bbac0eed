"""Where the shard of a save is built: in a slot of the memory tier or, where that has no room, in anonymous memory.

So a tmpfs that is too small, full or gone costs the checkpoint there, and not those in the other tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage, capacity_for
from torchelastic.checkpoint.store.host_memory.room import (
    Free,
    cgroup_available_bytes,
    require_tmpfs_room,
    shortage,
    why_no_room,
)
from torchelastic.checkpoint.store.host_memory.spare_memory import SpareMemory
from torchelastic.checkpoint.store.tier import Tier

Taken = TypeVar("Taken")


@dataclass(eq=False)
class Staged:
    """Where one save is built.

    Attributes:
        stage: holds the bytes.
        pool: where it goes back to.
        refused: why it is no slot of the memory tier, which does not have the save then; None: it is one, or there is
            no such tier.
    """

    stage: Stage
    pool: SlotPool
    refused: CheckpointError | None = None


class Stages:
    """The stages of one manager. `take` is called on the training thread, the rest beside it too.

    Args:
        tiers: of the manager.
        limit_bytes: how much more the control groups of this process allow; None: they have no limit.

    Attributes:
        tier: the one whose slots are published as they are; None: none of them has such.
    """

    def __init__(self, tiers: Sequence[Tier], limit_bytes: Callable[[], int | None] = cgroup_available_bytes) -> None:
        pools = [(tier, pool) for tier in tiers if isinstance(pool := getattr(tier, "pool", None), SlotPool)]
        self._spare = SpareMemory()
        self._limit_bytes = limit_bytes
        self.tier: Tier | None = pools[0][0] if pools else None
        self._pool = pools[0][1] if pools else self._spare.pool
        self._has_others = len(tiers) > 1
        self._refused: CheckpointError | None = None  # the last time that the tier was asked for a new slot

    def take(self, header: Header) -> Staged:
        """A stage for tensors of this layout.

        A tier that had no room the last time is asked again in the background only: to try may take long.

        Raises:
            CheckpointError: there is no room for a new one; says how much it needs and what to do.
        """
        refused = self._refused
        if refused is None or not self._has_others or self._pool.is_warm(header):
            try:
                return Staged(self._from_pool(self._pool.take, header), self._pool)
            except CheckpointError as error:
                refused = error
        if self.tier is None or not self._has_others:
            raise refused
        return Staged(self._spare.take(header, refused), self._spare.pool, refused)

    def keep_warm(self, header: Header) -> None:
        """Has a stage free for the next save: of the memory tier, if that has room again.

        Raises:
            CheckpointError: there is no room for it.
        """
        try:
            self._from_pool(self._pool.keep_warm, header)
        except CheckpointError as error:
            if self.tier is None or not self._has_others:
                raise
            self._spare.keep_warm(header, error)
            return
        if self.tier is not None:
            self._spare.pool.release_free_memory()

    def seal(self, staged: Staged, header: Header) -> None:
        """See `SlotPool.seal`; what the memory tier has no larger slot for goes on in anonymous memory."""
        try:
            staged.stage = staged.pool.seal(staged.stage, header)
        except CheckpointError as error:
            if self.tier is None or staged.pool is self._spare.pool:
                raise
            why = self._explained(error, header)
            if not self._has_others:
                raise why from error
            larger = self._spare.seal_copy(staged.stage, header, why)
            staged.pool.release_memory(staged.stage)
            staged.stage, staged.pool, staged.refused = larger, self._spare.pool, why

    def release(self, staged: Staged) -> None:
        """What is in a stage that was not published is needed no more. From any thread."""
        is_kept = staged.refused is None or self._refused is not None
        (staged.pool.release if is_kept else staged.pool.release_memory)(staged.stage)

    def close(self) -> None:
        """Gives back what is the manager's own."""
        self._spare.pool.close()

    def _from_pool(self, take: Callable[[Header], Taken], header: Header) -> Taken:
        folder = self._pool.folder
        is_new = folder is not None and not self._pool.is_warm(header)
        try:
            if folder is not None and is_new:
                self._pool.release_free_memory()  # as `take` does
                self._require_room(capacity_for(header), folder)
            taken = take(header)
        except CheckpointError as error:
            self._refused = self._explained(error, header)
            raise self._refused from error
        if is_new:
            self._refused = None
        return taken

    def _require_room(self, needed_bytes: int, folder: Path) -> None:
        """Before a new slot is made: a file on tmpfs that exceeds the limit of a container is no error, but a kill."""
        if self._refused is not None and folder.exists():
            require_tmpfs_room(needed_bytes, folder)
        limit_bytes = self._limit_bytes()
        if limit_bytes is not None and (why := why_no_room(needed_bytes, Free(None, limit_bytes), 0)) is not None:
            raise CheckpointError(f"there is no memory for a shard: {why.because}")

    def _explained(self, error: CheckpointError, header: Header) -> CheckpointError:
        folder = self._pool.folder
        return error if folder is None else shortage(error, capacity_for(header), folder)
