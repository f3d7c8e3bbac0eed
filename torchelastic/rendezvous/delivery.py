"""How the callbacks of a watch are called, and which arguments are refused: for etcd, and for the tests' own stores."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from torchelastic.rendezvous.store import (
    CompactedError,
    OnError,
    OnEvents,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)


class WatchCallbacks:
    """The two callbacks of one watch, called one at a time, `on_error` at most once, and neither after the end.

    The lock is held while a callback runs, so `end` waits for a running one: after it nothing of the watch's owner is
    touched any more. (An owner must therefore not end a watch while it holds a lock that its callbacks take.)
    It is re-entrant: ending a watch from its own callback does not hang.
    """

    def __init__(self, prefix: str, on_events: OnEvents, on_error: OnError) -> None:
        self._prefix = prefix
        self._on_events = on_events
        self._on_error = on_error
        self._lock = threading.RLock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it was ended, or has failed."""
        with self._lock:
            return self._ended

    def deliver(self, events: Sequence[StoreEvent]) -> bool:
        """Report a batch of events. Returns whether the watch is still alive afterwards."""
        with self._lock:
            if self._ended:
                return False
            try:
                self._on_events(events)
            except Exception as error:  # whatever the owner's code raises: the owner has now missed events
                logger.exception("the watch of %r ends: its callback failed", self._prefix)
                self.fail(StoreUnavailableError(f"the watch of {self._prefix!r} ended: its callback raised {error!r}"))
            return not self._ended

    def fail(self, error: StoreError) -> None:
        """End the watch with an error; does nothing if it has ended already."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                self._on_error(error)
            except Exception:  # there is nobody left to tell but the log
                logger.exception("the error callback of the watch of %r failed", self._prefix)

    def end(self) -> None:
        """End the watch quietly."""
        with self._lock:
            self._ended = True


def compacted_error(start_revision: int, compacted_revision: int) -> CompactedError:
    """What a watch gets that starts in a history that is gone."""
    return CompactedError(
        f"cannot watch from revision {start_revision}: the store is compacted up to revision {compacted_revision}; "
        "list again and watch from there"
    )


def check_start_revision(start_revision: int) -> None:
    """Refuse revision 0, which means "from whenever this arrives" to etcd, so that something would be missed.

    Raises:
        ValueError: `start_revision` is below 1.
    """
    if start_revision < 1:
        raise ValueError(f"start_revision is {start_revision}: list first and watch from the listing's revision + 1")


def check_ttl(ttl_s: float) -> None:
    """Refuse a lease that is over before it begins.

    Raises:
        ValueError: `ttl_s` is not a finite number above 0.
    """
    if not 0 < ttl_s < math.inf:
        raise ValueError(f"a lease of {ttl_s} s: give a finite time to live above 0")
