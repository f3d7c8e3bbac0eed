"""Notes that the ranks of a group leave for each other in the store of their round: for threads beside the training.

Nobody takes part in a collective, and nobody waits longer than a bound: who has left no note is the one that is missed,
and the next notes are read as if nothing had been. A group of gloo (`rank_group.RankGroup`) cannot do that: a rank that
once came too late is out of step with it for good; it ends with the groups of its round, while a save that all have
stored is still completed in the time of grace after that; and forming it for each round would hold the recovery up.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol

from torchelastic.checkpoint.errors import OutOfStepError

#: How often a note is looked for that is not there yet: soon at first, then ever more rarely.
FIRST_LOOK_S = 0.002
LAST_LOOK_S = 0.25


class Mailbox(Protocol):
    """Notes that every rank of a group can read; used by one thread at a time, also while the training thread works.

    Raises RuntimeError (as the store of a round does) when rank 0 is gone, or does not answer.
    """

    def post(self, key: str, words: bytes) -> None:
        """Leave a note."""

    def look(self, key: str) -> bytes | None:
        """Read a note; None: there is none yet. Never waits for one."""

    def delete(self, key: str) -> None:
        """Throw a note away; there may be none."""

    def end(self, grace_s: float) -> None:
        """The group has ended: in so many seconds whoever waits in a call is freed. Does not wait; from any thread."""


class Drawer:
    """The notes of a group of one."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def post(self, key: str, words: bytes) -> None:
        """See `Mailbox`."""
        self._notes[key] = words

    def look(self, key: str) -> bytes | None:
        """See `Mailbox`."""
        return self._notes.get(key)

    def delete(self, key: str) -> None:
        """See `Mailbox`."""
        self._notes.pop(key, None)

    def end(self, grace_s: float) -> None:
        """Nothing: nobody waits for oneself."""


class Notes:
    """What one rank writes into a mailbox and reads from it, as JSON. May be used by several threads.

    Args:
        mailbox: of the group.
        timeout_s: for each note of another rank that is waited for.
        monotonic: clock.
        sleep: lets time pass.

    Attributes:
        timeout_s: as given.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        timeout_s: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeout_s = timeout_s
        self._mailbox, self._monotonic, self._sleep = mailbox, monotonic, sleep
        self._lock = threading.Lock()  # of the mailbox; held for no wait
        self._lost: frozenset[int] = frozenset()
        self._until_s = math.inf  # nothing is waited for after that: who is not done soon after the group may be gone

    def end(self, grace_s: float) -> None:
        """The group has ended: nothing is waited for any longer than so many seconds from now; from any thread."""
        self._until_s = min(self._until_s, self._monotonic() + grace_s)
        self._mailbox.end(grace_s)

    def lose(self, ranks: Collection[int]) -> None:
        """These ranks leave no further notes; what they have left is still read. From any thread."""
        self._lost = frozenset(ranks)

    def post(self, key: str, value: Any) -> None:
        """Leave a note. Raises: OutOfStepError if the group has ended."""
        try:
            with self._lock:
                self._mailbox.post(key, json.dumps(value).encode())
        except RuntimeError as error:
            raise _ended(error) from error

    def delete(self, key: str) -> None:
        """Throw a note away that all who need it have read; there may be none."""
        with self._lock, suppress(RuntimeError):  # the group has ended, and its notes with it: what they said was heard
            self._mailbox.delete(key)

    def wait(self, key: str, rank: int, timeout_s: float | None = None, at_least: int | None = None) -> Any:
        """Read a note, when it is there.

        Args:
            key: of the note.
            rank: who leaves it, for the error.
            timeout_s: default: as given at the start.
            at_least: a number that its writer raises has to be so high.

        Raises:
            OutOfStepError: it is not there in time, its rank is lost, or the group has ended.
        """
        pause_s, timeout_s = FIRST_LOOK_S, self.timeout_s if timeout_s is None else timeout_s
        until_s = self._monotonic() + timeout_s
        while True:
            if self._monotonic() > self._until_s:  # not asked any more: if its host is gone, answers take long
                raise OutOfStepError(f"the group has ended before rank {rank} had stored or decided anything")
            is_lost = rank in self._lost
            try:
                with self._lock:
                    words = self._mailbox.look(key)
            except RuntimeError as error:
                raise _ended(error) from error
            value = None if words is None else json.loads(words)
            if value is not None and (at_least is None or value >= at_least):
                return value
            if is_lost:
                raise OutOfStepError(f"rank {rank} gives no sign of life any more")
            if self._monotonic() >= until_s:
                raise OutOfStepError(f"rank {rank} has neither stored nor decided anything for {timeout_s:g} s")
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)


def _ended(error: RuntimeError) -> OutOfStepError:
    return OutOfStepError(f"the group has ended: rank 0 cannot be reached any more ({error})")
