"""How much memory copies hold, at its highest."""

from __future__ import annotations

import weakref
from typing import Any

from benchmarks.job.events import EventLog
from torchelastic.checkpoint.format import pool
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.sharded import ShardedState


class SlotWatch:
    """Sees every piece of memory that is made for a copy, for as long as it lives.

    Make it before the first copy; use it on the training thread.

    Args:
        state: whose copies these are.
        note: gets an event "memory" from `tell`.
    """

    def __init__(self, state: ShardedState, note: EventLog) -> None:
        self._state, self._note = state, note
        self._shard_bytes = self._own_bytes = self._all_bytes = 0
        living: list[weakref.ref[Slot]] = []
        self._living = living

        class Watched(Slot):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                living.append(weakref.ref(self))  # the thread of a copy makes them, too

        vars(pool)["Slot"] = Watched

    def look(self) -> None:
        """Remember how much there is now, if it has never been more."""
        kept = self._state._copies
        slots = [slot for reference in list(self._living) if (slot := reference()) is not None]
        all_bytes = sum(slot.memory.nbytes for slot in slots)
        own = {id(copy.stage): copy.stage.slot.memory.nbytes for copy in kept.held if copy.owner is None}
        if kept._exchange is not None:
            own[id(kept._exchange.own.stage)] = kept._exchange.own.stage.slot.memory.nbytes
        self._all_bytes = max(self._all_bytes, all_bytes)
        self._own_bytes = max(self._own_bytes, sum(own.values()))
        self._shard_bytes = sum(tensor.nbytes for tensor in self._state._live.present.tensors().values())

    def tell(self) -> None:
        """Write down the largest that was seen."""
        self._note("memory", shard=self._shard_bytes, own=self._own_bytes, all=self._all_bytes)
