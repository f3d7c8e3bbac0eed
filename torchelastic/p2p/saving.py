"""Rank 0 saves, and the others go on when it has: over a key of the round's store.

Not in a collective, whose time-out a slow disk would exceed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

#: A save may take so long, and so many times as long as the slowest one so far. The first one has no bound.
MIN_BOUND_S, BOUND_FACTOR = 300.0, 10.0

#: Waits for a key; is given who is waited for, in words, and for how long at most.
WaitForKey = Callable[[str, Callable[[], str], float | None], None]


class SaveTurns:
    """The saves of one worker, on the training thread.

    Args:
        wait_for_key: of the present round's store; raises RuntimeError if the round breaks.
        clock: monotonic seconds.
    """

    def __init__(self, wait_for_key: WaitForKey, clock: Callable[[], float] = time.monotonic) -> None:
        self._wait_for_key, self._clock = wait_for_key, clock
        self._number = 0
        self._slowest_s: float | None = None

    def new_round(self) -> None:
        """The store is another one."""
        self._number = 0

    def run(self, store: Store, rank: int, save: Callable[[], None], *, everywhere: bool) -> None:
        """Call `save` on rank 0 while the others wait, or on every rank; every rank of the group calls this.

        Raises:
            RuntimeError: the round broke, or rank 0 took far longer than ever before.
            Exception: what `save` raises.
        """
        began_s = self._clock()
        self._number += 1
        key = f"saved/{self._number}"
        if everywhere:
            save()
        elif rank == 0:
            save()
            store.set(key, "1")
        else:
            bound_s = None if self._slowest_s is None else max(MIN_BOUND_S, BOUND_FACTOR * self._slowest_s)
            self._wait_for_key(key, lambda: "rank 0 to save a checkpoint", bound_s)
        self._slowest_s = max(self._slowest_s or 0.0, self._clock() - began_s)
