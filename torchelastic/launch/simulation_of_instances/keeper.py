"""Two processes that watch each other, so that the job survives the loss of neither.

The front is the process that the user has started: it waits, and passes signals on. The inner process does the work.
If the front is killed (SIGKILL included), the kernel sends the inner one SIGTERM, and it ends the job. If the inner one
is killed, everything below it becomes the front's, which ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from types import FrameType
from typing import NoReturn

from torchelastic.launch.simulation_of_instances.process_tree import (
    SurvivorsError,
    adopt_orphans,
    descendants,
    end_all,
    hear_of_parents_death,
)

#: What ends the simulator at once.
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal told this process to end; raised in the inner process's main thread, once.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell makes of it."""
        return 128 + self.number


def guarded(work: Callable[[], int]) -> int:
    """Runs `work` in a child process; when this returns, nothing that it has started is left.

    Signals: see `Interrupted`; those that were ignored before stay so (nohup). Call it on the main thread, while no
    other thread runs: it forks. Children that this process has already are left alone.

    Returns:
        What `work` returned; 128 + N if signal N ended it; 1 if it raised something.

    Raises:
        SurvivorsError: something could not be ended.
    """
    spare = frozenset(process.pid for process in descendants())
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)  # until each of the two knows what to do with them
    adopt_orphans()
    front = os.getpid()
    inner = os.fork()
    if inner == 0:
        _be_inner(work, front)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(inner, number)  # it is not reaped before the handlers are taken back

    handlers = {number: signal.signal(number, pass_on) for number in _not_ignored()}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        os.waitid(os.P_PID, inner, os.WEXITED | os.WNOWAIT)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        try:
            exit_code = _reap_inner(inner)
            end_all(clock=time.monotonic, sleep=time.sleep, spare=spare)
        finally:
            adopt_orphans(False)
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
    return exit_code


def _reap_inner(inner: int) -> int:
    exit_code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    if exit_code < 0:
        print(f"simulate-esi: killed by signal {-exit_code}; the job ends with it", file=sys.stderr)  # noqa: T201
    return exit_code if exit_code >= 0 else 128 - exit_code


def _be_inner(work: Callable[[], int], front: int) -> NoReturn:
    exit_code = 1
    try:
        hear_of_parents_death(signal.SIGTERM)
        adopt_orphans()
        for number in {*_not_ignored(), signal.SIGTERM}:
            signal.signal(number, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        if os.getppid() != front:
            raise Interrupted(signal.SIGTERM)
        exit_code = work()
    except Interrupted as interrupted:
        exit_code = interrupted.exit_code
    except BaseException:  # noqa: BLE001 - above this frame is what belongs to the front
        traceback.print_exc()
    finally:
        _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    ignore_signals()
    try:
        end_all(clock=time.monotonic, sleep=time.sleep)
        sys.stdout.flush()
        sys.stderr.flush()
    except (SurvivorsError, OSError) as error:
        exit_code = exit_code or 1
        os.write(2, f"simulate-esi: {error}\n".encode())
    finally:
        os._exit(exit_code)


def ignore_signals() -> None:
    """From now on nothing but SIGKILL interrupts this process."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    ignore_signals()  # what follows is the end, which nothing is to interrupt
    raise Interrupted(number)


def _not_ignored() -> Collection[signal.Signals]:
    return [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
