"""Whether the replicas of a state are still equal, between two syncs: digests that travel with the step agreement.

A rank begins to compute its digest at the end of one step, sends it with the exchange after that, and learns with the
next one whether all have sent the same. So no rank waits for another, nor for its GPU. How often is agreed on, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchelastic.state import ReplicaDigests, State

#: Part of the training time that the digests may cost.
MAX_SHARE = 0.001
#: Exchanges of a group before its first digest: what they cost is known then, and the sync has just compared all.
FIRST_AFTER = 10
#: int64 words in an exchange, of which the ranks take the maximum.
WORDS = 2 * len(ReplicaDigests._fields) + 1


class ReplicaVerdict(NamedTuple):
    """What the ranks have found; the same on all of them.

    Attributes:
        are_equal: whether all have the same state, as far as a sample shows.
        draw_alike: the generators of random numbers from which all draw the same.
    """

    are_equal: bool
    draw_alike: frozenset[str]


def exchanges_between(cost_s: float, exchange_s: float) -> int:
    """How many exchanges there are from one digest to the next. Pure.

    Args:
        cost_s: of one digest.
        exchange_s: from one exchange to the next.

    >>> exchanges_between(0.002, 0.5), exchanges_between(0.00001, 0.5)
    (4, 2)
    """
    return max(2, math.ceil(min(cost_s / max(MAX_SHARE * exchange_s, 1e-9), 1e9)))


class ReplicaWatch:
    """One per group, on the training thread of every rank.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._exchanges = 0
        self._next_at = FIRST_AFTER
        self._running: Callable[[], ReplicaDigests] | None = None
        self._cost_s = 0.0
        self._is_sent = False

    def words(self, state: State, exchange_s: float) -> list[int]:
        """What this rank puts into the exchange that it starts now.

        Args:
            state: after a committed step.
            exchange_s: the time from one exchange to the next, as a rule.
        """
        began_s = self._clock()
        if self._running is not None:
            digests, self._running, self._is_sent = self._running(), None, True
            wanted = exchanges_between(self._cost_s + self._clock() - began_s, exchange_s)
            return [wanted, *digests, *(-each for each in digests)]
        if self._exchanges == self._next_at:
            self._running = state.begin_replica_comparison()
            self._cost_s = self._clock() - began_s
        return [0] * WORDS

    def read(self, words: Sequence[int]) -> ReplicaVerdict | None:
        """What has come of the last exchange, the maximum of all ranks' words. None: there was no digest in it."""
        self._exchanges += 1
        if not self._is_sent:
            return None
        self._is_sent = False
        wanted, *digests = words
        self._next_at = self._exchanges + wanted
        most, least = digests[: len(digests) // 2], digests[len(digests) // 2 :]
        equal = {name for name, *pair in zip(ReplicaDigests._fields, most, least, strict=True) if sum(pair) == 0}
        return ReplicaVerdict("state" in equal, frozenset(equal - {"state"}))
