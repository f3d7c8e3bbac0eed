"""Which ranks of a group are busy in their own code while the others wait for them: signs in the round's store.

Only ranks whose step is late publish and read them, on the thread of `Heartbeat`, so that a step in time costs nothing.
Plain strings; invalid ones are ignored.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from torchelastic.p2p.hang_location import HangLocation, decode

#: A rank that begins a slow section waits at most so long until that is published.
PUBLISH_S = 1.0
#: Each key holds the last rank that wrote: one such rank is reason enough to wait, and one key is cheap to read.
_WORKS, _STUCK = "busy/works", "busy/stuck"
#: How many ranks are in a slow section.
_SLOW = "busy/slow"
_SLOWEST = "busy/slowest_s"


class BusySigns:
    """The signs of one group; one object for each round.

    Args:
        rank: of this process.
        clock: monotonic seconds.

    Attributes:
        works: the other rank that has last worked since the first call of `idle_s`, with its location; None: none has.
        stuck: the same of one in its own code whose thread does not move.
        slowest_s: how long the slowest step of the run took, as published by rank 0; None: it has not.
        due: wakes the thread that calls `exchange`.
    """

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self.works: HangLocation | None = None
        self.stuck: HangLocation | None = None
        self.slowest_s: float | None = None
        self.due = threading.Event()
        self._rank, self._clock = rank, clock
        self._count = 0
        self._own: tuple[str, str] | None = None
        self._is_asked = self._is_slow_elsewhere = self._has_signs = False
        self._busy_s = 0.0
        self._own_code_s = -math.inf
        self._seen: dict[str, bytes] = {}
        self._sections = self._published_sections = 0
        self._has_read_slowest = False
        self._published = threading.Event()

    # --- on the watchdog's thread -------------------------------------------------------------------------------------

    def give(self, location: HangLocation, *, works: bool) -> None:
        """This rank is late, at that location, and works or does not move. Published at once, by an exchange."""
        self._count += 1
        self._own = (_WORKS if works else _STUCK), f"{self._count} {location.encode()}"
        self.due.set()  # who waits allows it little time

    def idle_s(self) -> float:
        """For how long no other rank is known to have been busy, counted from the first call."""
        if not self._is_asked:
            self.works = self.stuck = None
            self._is_slow_elsewhere, self._has_signs, self._seen = False, False, {}
            self._own_code_s = -math.inf
            self._busy_s, self._is_asked = self._clock(), True
        return self._clock() - self._busy_s

    def quiet_s(self) -> float:
        """The same, where a rank counts as busy for as long as it says that it is in its own code."""
        return min(self.idle_s(), self._clock() - self._own_code_s)

    def rest(self) -> None:
        """Signs are not needed any more. From any thread."""
        self._is_asked = False

    # --- on the training thread ---------------------------------------------------------------------------------------

    def begin_section(self) -> None:
        """This rank is in a slow section; returns when the others can know, or after `PUBLISH_S`."""
        self._published.clear()
        self._sections += 1
        self.due.set()
        self._published.wait(PUBLISH_S)

    def end_section(self) -> None:
        """It has left it. Waits for nobody."""
        self._sections -= 1
        self.due.set()

    def is_busy(self, within_s: float) -> bool:
        """Whether another rank is known to have been busy, within so many seconds."""
        return self._is_asked and self._has_signs and self._clock() - self._busy_s < within_s

    def who(self) -> str:
        """The rank that is busy, for people."""
        if self.works is None and self.stuck is not None and not self._is_slow_elsewhere:
            return f"rank {self.stuck.rank}, which is in its own code, in {self.stuck.where or 'an unknown line'}"
        if self._is_slow_elsewhere or self.works is None:
            return "a rank in a slow section"
        return f"rank {self.works.rank}, which works in {self.works.where or 'its own code'}"

    # --- on the thread that uses the store ------------------------------------------------------------------------

    def exchange(self, store: Store) -> None:
        """Publish the signs that are due, and read those of the others if they are needed. Raises RuntimeError."""
        if not self._has_read_slowest:
            self._has_read_slowest, self.slowest_s = True, _read_slowest(store)
        own, self._own = self._own, None
        if own is not None:
            store.set(*own)
        change = self._sections - self._published_sections
        if change:
            store.add(_SLOW, change)
            self._published_sections += change
            self._published.set()
        if self._is_asked:
            self._read_signs(store)

    def _read_signs(self, store: Store) -> None:
        seen = self._seen
        self._is_slow_elsewhere = store.add(_SLOW, 0) > self._published_sections
        works, stuck = self._changed(store, _WORKS, seen), self._changed(store, _STUCK, seen)
        if works is not None or self._is_slow_elsewhere:
            self.works, self._busy_s, self._has_signs = works or self.works, self._clock(), True
        if stuck is not None:
            self.stuck, self._own_code_s = stuck, self._clock()

    def _changed(self, store: Store, key: str, seen: dict[str, bytes]) -> HangLocation | None:
        """What another rank has written there since the last read; None: nothing, or it may be of an earlier step."""
        value = store.get(key) if store.check([key]) else b""
        if value == seen.setdefault(key, value):
            return None
        seen[key] = value
        location = decode(value.decode(errors="replace").partition(" ")[2])
        return None if location is None or location.rank == self._rank else location


def publish_slowest(store: Store, slowest_s: float) -> None:
    """For rank 0, before the group is formed: how long the slowest step of the run took."""
    store.set(_SLOWEST, f"{slowest_s:.3f}")


def _read_slowest(store: Store) -> float | None:
    text = store.get(_SLOWEST).decode(errors="replace") if store.check([_SLOWEST]) else ""
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{3}", text) else None
