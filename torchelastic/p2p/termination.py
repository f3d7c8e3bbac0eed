"""SIGTERM to a worker: it requests to leave its group at an agreed step, instead of dying in the middle of one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from torchelastic.lifetime.sources.signals import SignalNotices, notices_instead_of_default
from torchelastic.rendezvous.client import AgentError
from torchelastic.rendezvous.handler import RendezvousHandler

log = logging.getLogger(__name__)


class SigtermHandler:
    """What this process does on SIGTERM; there is one for its whole life.

    The handler itself only sets a flag and writes to a pipe: it runs between any two instructions of the main thread,
    which may hold any lock. A thread of its own does the rest.

    Args:
        rendezvous: of the present run.
        below: took SIGTERM as a notice of the end before; is called where there is nobody to ask, and with every signal
            if the user has named SIGTERM as a notice. None: the default action.
    """

    def __init__(self, rendezvous: RendezvousHandler, below: SignalNotices | None = None) -> None:
        self.rendezvous = rendezvous
        self._below = signal.getsignal(signal.SIGTERM) if below is not None else None
        self._tells_both = below is not None and not below.gives_way
        self._has_asked = self._is_a_notice = False
        self._out, self._in = os.pipe()
        threading.Thread(target=self._ask, name="torchelastic-sigterm", daemon=True).start()
        # a child of fork (a data loader) is to end on SIGTERM as ever
        os.register_at_fork(after_in_child=self._restore_default)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The first one asks, if there is somebody to ask; any further one ends the process as by default."""
        asks = not self._has_asked and not self._is_a_notice and self.rendezvous.can_leave()
        if asks:
            self._has_asked = True
            os.write(self._in, b".")
        if callable(self._below) and (self._tells_both or not self._has_asked):
            self._is_a_notice = not self._has_asked
            self._below(number, frame)  # which ends the process if a second one comes some seconds later
        elif not asks:
            self._restore_default()
            os.kill(os.getpid(), number)

    def _ask(self) -> None:
        os.read(self._out, 1)
        try:
            self.rendezvous.leave()
        except AgentError as error:
            log.warning("could not ask to leave, so this worker goes on until a second SIGTERM: %s", error)
        else:  # not before: it is the step that whoever reads this sees in progress
            log.warning("SIGTERM: this worker leaves the run at the end of a step; a second one ends it at once")

    def _restore_default(self) -> None:
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave_on_sigterm(rendezvous: RendezvousHandler) -> None:
    """Have SIGTERM mean that; from the main thread, and where nobody else has a handler. Else nothing is changed.

    Where SIGTERM is a notice of a deadline (`torchelastic.lifetime`), leaving goes before it: a group goes on without
    this process, where a deadline would stop all of it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(signal.SIGTERM)
    notices = notices_instead_of_default(signal.SIGTERM)
    if isinstance(present, SigtermHandler):
        present.rendezvous = rendezvous  # a second run in this process
    elif present is signal.SIG_DFL or notices is not None:
        signal.signal(signal.SIGTERM, SigtermHandler(rendezvous, notices))
