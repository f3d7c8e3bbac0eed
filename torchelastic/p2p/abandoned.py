"""Groups that were given up while operations of theirs are under way: kept until those have ended, then released.

Releasing one earlier waits for the threads of gloo that run its operations, up to the time-out of collectives, and on
the thread that happens to drop the last reference. Where that is an object of torch's C++ (the reducer of a DDP
wrapper), it waits with the interpreter's lock held, so that no thread of the process runs meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from collections.abc import Collection

from torchelastic.group.store_mailbox import MAX_EXIT_S
from torchelastic.metrics import publish_metric
from torchelastic.p2p.abortable import AbortableGroup

log = logging.getLogger(__name__)

#: How often it is checked whether operations have ended.
CHECK_S = 0.1
#: More than this is worth a warning: gloo ends each operation after the time-out of collectives, so few are expected.
MAX_GROUPS = 8
MAX_BYTES = 2**30


class AbortedGroups:
    """The groups of one process that were given up. Thread-safe; a thread of its own runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._release_lock = threading.Lock()
        self._groups: list[AbortableGroup] = []
        self._is_releasing = False
        self._has_warned = False

    @property
    def count(self) -> int:
        """How many there are; waits for a release that is under way."""
        with self._release_lock:
            return len(self._groups)

    def add(self, groups: Collection[AbortableGroup]) -> None:
        """Take groups that were aborted and that nobody uses any more. Does not wait."""
        if not groups:
            return
        with self._lock:
            self._groups.extend(groups)
            if not self._is_releasing:
                self._is_releasing = True
                threading.Thread(target=self._release, name="torchelastic-abandoned", daemon=True).start()

    def leave_to_the_system(self) -> None:
        """At the end of the process: release nothing any more, and wait for nothing that is under way."""
        # Python ends its threads in the middle of what they do; one that is inside gloo then would abort the process
        self._release_lock.acquire(timeout=MAX_EXIT_S)
        with self._lock:
            for group in self._groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # else Python releases it, which waits

    def _release(self) -> None:
        while True:
            time.sleep(CHECK_S)
            with self._release_lock:
                with self._lock:
                    idle = [group for group in self._groups if group.is_idle()]
                    self._groups[:] = [group for group in self._groups if group not in idle]
                    count, held_bytes = len(self._groups), sum(group.held_bytes() for group in self._groups)
                    self._is_releasing = count > 0
                idle.clear()  # not under the lock that `add` takes: gloo needs some milliseconds to end its threads
            self._report(count, held_bytes)
            if not count:
                return

    def _report(self, count: int, held_bytes: int) -> None:
        publish_metric("torchelastic", "groups.abandoned", count)
        publish_metric("torchelastic", "groups.abandoned.bytes", held_bytes)
        is_much = count > MAX_GROUPS or held_bytes > MAX_BYTES
        if is_much and not self._has_warned:
            log.warning(
                "%d aborted process groups hold %.0f MiB until gloo ends their collectives, which takes up "
                "to process_group_timeout",
                count,
                held_bytes / 2**20,
            )
        self._has_warned = is_much


#: Of this process.
aborted_groups = AbortedGroups()
atexit.register(aborted_groups.leave_to_the_system)
