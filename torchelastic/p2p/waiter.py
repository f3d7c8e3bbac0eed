"""A thread that waits in another one's stead, where the wait itself cannot be ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Waiter:
    """One wait after the other; it ends with `end`.

    Attributes:
        is_busy: whether it waits at present, for whoever still wants to know or for nobody any more.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self._calls: queue.SimpleQueue[_Wait | None] = queue.SimpleQueue()
        self._present: _Wait | None = None
        threading.Thread(target=self._run, name="torchelastic-messages", daemon=True).start()

    def wait(self, wait: Callable[[], object], raise_if_aborted: Callable[[], None]) -> None:
        """Have `wait` called on the thread, and wait for its end or for `wake`; for one thread at a time.

        Raises what `wait` raises; after `wake`, what `raise_if_aborted` raises.
        """
        call = self._present = _Wait(wait)
        try:
            self.is_busy = True
            self._calls.put(call)
            raise_if_aborted()  # an abort before the first line has woken nobody
            call.woken.acquire()
        finally:
            self._present = None
        if not call.has_ended:
            raise_if_aborted()
        if call.error is not None:
            raise call.error

    def wake(self) -> None:
        """Free who waits; from any thread."""
        call = self._present
        if call is not None:
            call.wake()

    def end(self) -> None:
        """No further waits."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.wait()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                call.error = error
            call.wait = _nothing  # it holds the message's memory, which is the caller's again
            call.has_ended = True
            self.is_busy = False
            call.wake()
            del call


def _nothing() -> None:
    """What is left of a wait that has ended."""


class _Wait:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.error: BaseException | None = None
        self.has_ended = False
        self.woken = threading.Lock()
        self.woken.acquire()

    def wake(self) -> None:
        try:
            self.woken.release()
        except RuntimeError:
            pass  # the end and the abort came together
