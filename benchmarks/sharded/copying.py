"""Measures what copies cost a training: the same processes train without any, with few and with many, in turn."""

from __future__ import annotations

import torch

from benchmarks.checkpoint.payload import Memcpy, Payload
from benchmarks.job.events import EventLog
from benchmarks.sharded.floor import wait_for_copies
from torchelastic.sharded import ShardedState

#: Ways of copying, by name: steps from one copy to the next. The one after `none` has long had no copy, so that in as
#: many steps it makes exactly one.
WAYS = {"none": 10**9, "every_20": 20, "every_5": 5, "every_1": 1}
#: Steps without a copy before those that are timed: what the last way has begun is over then.
LEAD_IN = 3
MEMCPY_RUNS = 3


class CopySchedule:
    """Changes the steps from one copy to the next, after a number of steps, on all ranks in the same one.

    The steps without copies do all that those of `replicas=0` do: with copies or without, ranks vote in each step.

    Args:
        state: whose copies these are.
        note: gets "block_begins" and "block_ends" with round, way and the copies begun so far, and "memcpy" with ms.
        rounds: in which every way comes once.
        steps: of each way in a round, timed.
    """

    def __init__(self, state: ShardedState, note: EventLog, *, rounds: int, steps: int) -> None:
        self._state, self._note, self._rounds, self._steps = state, note, rounds, steps

    def step_begins(self, number: int) -> bool:
        """Called by every member of the full group before each step. Returns whether all rounds are over.

        Args:
            number: of the step in this group, from 0.
        """
        turn, place = divmod(number, LEAD_IN + self._steps)
        round_number, place_of_way = divmod(turn, len(WAYS))
        names = list(WAYS)
        if place == 0:
            if turn:
                last_round, last_way = divmod(turn - 1, len(WAYS))
                self._tell("block_ends", last_round, names[last_way])
            self._state._every = WAYS["none"]
        if place == LEAD_IN:
            wait_for_copies(self._state)
            self._copy_plainly(round_number)
            self._state._every = WAYS[names[place_of_way]]
            wait_for_copies(self._state)
            self._tell("block_begins", round_number, names[place_of_way])
        return round_number == self._rounds

    def _tell(self, event: str, round_number: int, way: str) -> None:
        self._note(event, number=round_number, way=way, copies=self._state._copies.started)

    @torch.no_grad()
    def _copy_plainly(self, round_number: int) -> None:
        """The floor: the same bytes into warm memory, at the same time on all ranks."""
        tensors = self._state._live.present.tensors()
        payload = Payload(tensors, sum(tensor.nbytes for tensor in tensors.values()))
        memcpy = Memcpy(payload)
        memcpy.once_ms()  # its memory is fresh
        for _ in range(MEMCPY_RUNS):
            wait_for_copies(self._state)
            self._note("memcpy", number=round_number, ms=memcpy.once_ms(), bytes=payload.size_bytes)
