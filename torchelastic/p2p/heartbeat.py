"""Signs of life of the ranks of a group, while no step shows that all of them are alive.

A process that is stopped, or that hangs with the interpreter's lock held, gives none. Each rank counts up a key of the
round's store; who has begun to doubt reads those of the others. That a rank is silent is a guess that it hangs: code
that keeps the interpreter's lock for seconds looks the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from torchelastic.group.store_mailbox import OwnConnection
from torchelastic.p2p.busy import BusySigns

log = logging.getLogger(__name__)

#: Between two signs of life.
BEAT_S = 0.5


class Heartbeat:
    """The signs of life of one group, given and read on a thread of its own. One object for each round.

    Args:
        store: of the round.
        rank: of this process.
        world_size: of the group.
        clock: monotonic seconds.

    Attributes:
        busy: the signs of work of those that are late, which go the same way; None: there is nobody else.
        also: what else is looked for in the store with each sign.
    """

    def __init__(self, store: Store, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        # on a thread of this round alone: a rank 0 that was stopped for long, and lives again, gets its signs
        self._store = OwnConnection(store, answer_s=None)
        self._rank, self._world_size, self._clock = rank, world_size, clock
        self.busy = BusySigns(rank, clock) if world_size > 1 else None
        self.also: Callable[[Store], None] = _nothing
        self._ended = threading.Event()
        self._is_asked = False
        self._beats = 0
        self._seen: dict[int, bytes] = {}
        self._last_s: dict[int, float] = {}
        self._answered_s = clock()
        if world_size > 1:
            threading.Thread(target=self._run, args=(self.busy,), name="torchelastic-heartbeat", daemon=True).start()

    def end(self) -> None:
        """The group is over. Does not wait; from any thread."""
        self._ended.set()
        if self.busy is not None:
            self.busy.due.set()

    def silent_s(self) -> dict[int, float]:
        """For how long each of the other ranks has given no sign, counted from the first call; from any thread."""
        now_s = self._clock()
        if not self._is_asked:
            self._last_s = {rank: now_s for rank in range(self._world_size) if rank != self._rank}
            self._answered_s = now_s
            self._is_asked = True
        # as far as is known: an unanswered request to rank 0's store is a sign against rank 0 only
        silent_s = {rank: self._answered_s - last_s for rank, last_s in self._last_s.items()}
        if 0 in silent_s:
            silent_s[0] = max(silent_s[0], now_s - self._answered_s)
        return silent_s

    def rest(self) -> None:
        """Nobody wants to know any more: only give signs. From any thread."""
        self._is_asked = False

    def _run(self, busy: BusySigns) -> None:
        try:
            while True:
                busy.due.wait(BEAT_S)
                busy.due.clear()
                if self._ended.is_set():
                    return
                self._beats += 1
                self._store.ask(lambda store: self._beat(store, busy))
        except RuntimeError as error:
            log.debug("no signs of life any more: %s", error)  # rank 0 is gone, and with it the round

    def _beat(self, store: Store, busy: BusySigns) -> None:
        store.set(_key(self._rank), str(self._beats))
        busy.exchange(store)
        self.also(store)
        if self._is_asked:
            self._last_sample(store)

    def _last_sample(self, store: Store) -> None:
        ranks = [rank for rank in self._last_s if store.check([_key(rank)])]
        beats = store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        now_s = self._clock()
        for rank, beat in zip(ranks, beats, strict=True):
            if self._seen.get(rank) != beat:
                self._seen[rank], self._last_s[rank] = beat, now_s
        self._answered_s = now_s


def _nothing(_: Store) -> None:
    """Nothing else is looked for."""


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
