"""SIGTERM to a worker: it asks to leave its group at an agreed step, instead of dying in the middle of one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from torchelastic.rendezvous.client import AgentError
from torchelastic.rendezvous.handler import RendezvousHandler

log = logging.getLogger(__name__)


class SigtermHandler:
    """What this process does on SIGTERM; there is one for its whole life.

    The handler itself only sets a flag and writes to a pipe: it runs between any two instructions of the main thread,
    which may hold any lock. A thread of its own does the rest.

    Args:
        rendezvous: of the present run.
    """

    def __init__(self, rendezvous: RendezvousHandler) -> None:
        self.rendezvous = rendezvous
        self._has_asked = False
        self._out, self._in = os.pipe()
        threading.Thread(target=self._ask, name="torchelastic-sigterm", daemon=True).start()
        # a child of fork (a data loader) is to end on SIGTERM as ever
        os.register_at_fork(after_in_child=self._restore_default)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The first one asks, if there is somebody to ask; any further one ends the process as by default."""
        del frame
        if self._has_asked or not self.rendezvous.can_leave():
            self._restore_default()
            os.kill(os.getpid(), number)
        else:
            self._has_asked = True
            os.write(self._in, b".")

    def _ask(self) -> None:
        os.read(self._out, 1)
        log.warning("SIGTERM: this worker leaves the run at the end of a step; a second one ends it at once")
        try:
            self.rendezvous.leave()
        except AgentError as error:
            log.warning("could not ask to leave: %s", error)

    def _restore_default(self) -> None:
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave_on_sigterm(rendezvous: RendezvousHandler) -> None:
    """Have SIGTERM mean that; from the main thread, and where nobody else has a handler. Else nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(signal.SIGTERM)
    if isinstance(present, SigtermHandler):
        present.rendezvous = rendezvous  # a second run in this process
    elif present is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, SigtermHandler(rendezvous))
