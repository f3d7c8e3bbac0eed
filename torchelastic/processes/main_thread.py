"""A signal for the main thread of a process, and for no other of its threads."""

from __future__ import annotations

import ctypes
import os


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process of this host (`tgkill(2)`).

    `os.kill` leaves to the kernel which thread takes the signal. In a stopped process that is the first one to run
    after SIGCONT: the stacks that it then dumps may show the main thread already somewhere else.

    Args:
        pid: of the process, which is also the id of its main thread.
        number: of the signal.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it belongs to somebody else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        tgkill = libc.tgkill
    except AttributeError:  # a libc without it (musl, macOS): the process as a whole then
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # the subclass that belongs to the code
