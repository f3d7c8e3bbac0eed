"""Everything that a process has started, and what those have started: orphans come back to it (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable

import psutil

from torchelastic.processes.lifeline import PR_SET_PDEATHSIG

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

#: For so long it is waited for processes that have got SIGKILL.
_PATIENCE_S = 10.0
_LOOK_S = 0.02


class SurvivorsError(RuntimeError):
    """Processes are still there after SIGKILL: they belong to somebody else, or the kernel holds them; names them."""


def adopt_orphans(does: bool = True) -> None:
    """Whatever this process's descendants leave behind becomes its child (`prctl(2)`, PR_SET_CHILD_SUBREAPER).

    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, int(does))


def hear_of_parents_death(number: signal.Signals) -> None:
    """This process gets the signal when its parent ends, however that ends. Raises OSError."""
    _prctl(PR_SET_PDEATHSIG, int(number))


def is_supported() -> bool:
    """Whether this operating system can do it."""
    return sys.platform == "linux"


def descendants(spare: Collection[int] = ()) -> list[psutil.Process]:
    """All processes that descend from this one, dead ones that nobody has waited for included.

    Args:
        spare: pids of children that are left out, with what descends from them.
    """
    me = psutil.Process()
    if not spare:
        return me.children(recursive=True)
    found = []
    for child in me.children():
        if child.pid not in spare:
            try:
                found += [child, *child.children(recursive=True)]
            except psutil.NoSuchProcess:
                pass  # it was waited for meanwhile
    return found


def reap(pids: Iterable[int] = (-1,)) -> dict[int, int]:
    """Takes notice of the children that have ended; by pid, their exit codes (negative: a signal). Never waits.

    Args:
        pids: only these; -1: any child of this process.
    """
    ended: dict[int, int] = {}
    for wanted in pids:
        while True:
            try:
                pid, status = os.waitpid(wanted, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def end_all(
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    spare: Collection[int] = (),
    patience_s: float = _PATIENCE_S,
) -> tuple[set[int], dict[int, int]]:
    """SIGKILL to every descendant, again and again until none is left: meanwhile they may have started others.

    Needs `adopt_orphans`, else what lies behind a process that dies first is lost sight of.

    Args:
        clock: monotonic seconds.
        sleep: waits for so many seconds.
        spare: as of `descendants`.
        patience_s: give up after so long.

    Returns:
        The pids of those that were alive, and by pid the exit codes of those that were children of this process.

    Raises:
        SurvivorsError: some are still there after `patience_s`.
    """
    killed: set[int] = set()
    ended: dict[int, int] = {}
    give_up_s = clock() + patience_s
    while present := descendants(spare):
        for process in present:
            if _kill(process):
                killed.add(process.pid)
        ended |= reap([process.pid for process in present] if spare else (-1,))
        if clock() > give_up_s:
            raise SurvivorsError(
                f"still there {patience_s:g} s after SIGKILL: {', '.join(map(_describe, present))}. They belong to "
                "another user, or the kernel waits for a device: end them by hand before the job is started again"
            )
        sleep(_LOOK_S)
    return killed, ended


def _kill(process: psutil.Process) -> bool:
    """Whether it was alive. Also what looks dead gets the signal: a first thread may end before the others."""
    try:
        was_alive = bool(process.status() != psutil.STATUS_ZOMBIE)
        process.kill()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return was_alive


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.name()})"
    except psutil.Error:
        return str(process.pid)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
