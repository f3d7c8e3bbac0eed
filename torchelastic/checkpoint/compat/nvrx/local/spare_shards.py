"""Shards that the folder of a host has no room for: in memory beside it, until they are in durable storage."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import suppress
from types import TracebackType

from torchelastic.checkpoint.engine.stages import Staged, Stages
from torchelastic.checkpoint.errors import CheckpointError, NotPublishedError
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.checkpoint.store.tier import SealedShard
from torchelastic.processes.background import in_background


class SpareShard:
    """One of them; all of it is copied. Its memory is free again when it is closed.

    Args:
        shard: which.
        staged: where it is.
        header: of it; its checksums still to come.
        stages: where the stage is from; asked here, beside the training, whether the folder has room again.
    """

    def __init__(self, shard: ShardId, staged: Staged, header: Header, stages: Stages) -> None:
        self._staged: Staged | None = staged
        self._stages = stages

        def seal() -> SealedShard:
            stages.seal(staged, header)
            with suppress(CheckpointError):
                stages.keep_warm(header)
            return SealedShard(shard.name, shard.rank, shard.world_size, staged.stage.shard)

        self._sealed = in_background(seal, "spare-shard")

    def record(self) -> ShardRecord:
        """What the manifest is to say of it. Raises: CheckpointError."""
        return self._sealed.result().record

    def view(self) -> memoryview:
        """All of its bytes."""
        return self._sealed.result().data[:]

    def close(self) -> None:
        """Gives its memory back; doing it again does nothing."""
        staged, self._staged = self._staged, None
        if staged is not None:
            wait([self._sealed])  # it is written to until then
            self._stages.release(staged)

    def __enter__(self) -> SpareShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def why_unkept(refused: Mapping[int, str], own: CheckpointError | None) -> CheckpointError | None:
    """Why a checkpoint is not kept on the hosts; None if it is.

    Args:
        refused: the ranks whose hosts had no room, and why.
        own: that of this rank, if it is one of them.
    """
    if own is not None or not refused:
        return own
    rank, why = next(iter(refused.items()))
    return NotPublishedError(f"rank {rank} had no room for its shard: {why}")


def what_becomes(is_copied: bool) -> str:
    """Of such a checkpoint, for the log: behind its name."""
    return f" {'goes to durable storage alone' if is_copied else 'is saved nowhere'}; training goes on"
