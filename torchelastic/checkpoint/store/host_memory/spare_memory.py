"""Anonymous memory for shards that the memory of a host (a folder on tmpfs) has no room for, within what is free."""

from __future__ import annotations

from collections.abc import Callable

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage, capacity_for
from torchelastic.checkpoint.store.host_memory.room import Free, free_ram_bytes, why_no_room


class SpareMemory:
    """Slots without files, used again and again; a new one only where that leaves enough for everybody else.

    May be used by several threads.

    Args:
        free_bytes: how much memory can be allocated; see `free_ram_bytes`.

    Attributes:
        pool: of the slots; what was taken is given back there.
    """

    def __init__(self, free_bytes: Callable[[], int] = free_ram_bytes) -> None:
        self.pool = SlotPool(None)
        self._free_bytes = free_bytes

    def take(self, header: Header, instead_of: CheckpointError) -> Stage:
        """A stage for tensors of this layout.

        Args:
            header: see `SlotPool.take`.
            instead_of: why it is no slot on tmpfs.

        Raises:
            CheckpointError: there is too little memory for it, too; says both.
        """
        self._require_room(header, instead_of)
        return self.pool.take(header)

    def keep_warm(self, header: Header, instead_of: CheckpointError) -> None:
        """Has a stage free for the next `take`. Raises: as `take`."""
        self._require_room(header, instead_of)
        self.pool.keep_warm(header)

    def seal_copy(self, stage: Stage, header: Header, instead_of: CheckpointError) -> Stage:
        """See `SlotPool`. Raises: as `take`."""
        self._require_room(header, instead_of, is_new=True)
        return self.pool.seal_copy(stage, header)

    def _require_room(self, header: Header, instead_of: CheckpointError, *, is_new: bool = False) -> None:
        if not is_new and self.pool.is_warm(header):
            return
        why = why_no_room(capacity_for(header), Free(None, self._free_bytes()))
        if why is not None:
            raise CheckpointError(f"{instead_of}; beside the tmpfs there is no memory for it, either: {why.because}")
