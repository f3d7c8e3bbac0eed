"""For tests of SIGTERM: a rendezvous that somebody may leave, and processes that end by the signal."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable

from torchelastic.rendezvous.handler import RendezvousHandler

ENDED_BY_SIGTERM = -signal.SIGTERM


class Rendezvous(RendezvousHandler):
    """Only remembers that somebody wanted to leave."""

    def __init__(self, *, can_leave: bool = True) -> None:
        self.left = threading.Event()
        self._can_leave = can_leave

    def next_rendezvous(self):  # type: ignore[no-untyped-def]  # not called
        raise NotImplementedError

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise NotImplementedError

    def num_nodes_waiting(self) -> int:
        return 0

    def can_leave(self) -> bool:
        return self._can_leave

    def leave(self) -> None:
        self.left.set()


def exit_code_of(process: Callable[[], None]) -> int:
    """What a forked process ends with that does this; at its beginning SIGTERM ends it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            process()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
