"""What the children of a killed process have left running: found, and ended, by whoever comes after it.

A process that holds a folder of its own (`own_folder`) notes there which sessions it has begun for its children. They
have the name of the folder in their environment, as everything has that they start.

    <folder>/sessions/4711    the session of a child; goes when that has ended in order
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchelastic.processes.family import command_of, in_session
from torchelastic.processes.identity import Process

_SESSIONS = "sessions"
_POLL_S = 0.02
#: So long may a process take that tidies up behind others.
_TIDY_S = 1.0


class Sessions:
    """The sessions of one process's children.

    Args:
        folder: of that process; its name is in the environment of the children.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _SESSIONS

    def begun(self, pid: int) -> None:
        """A child has been started as the first process of a session."""
        with suppress(OSError):  # a full disk: then what it leaves ends when it does
            self._folder.mkdir(exist_ok=True)
            (self._folder / str(pid)).touch()

    def ended_in_order(self, pid: int) -> None:
        """What this child has left running is to go on."""
        with suppress(OSError):
            (self._folder / str(pid)).unlink()


def left_running(folder: Path) -> list[Process]:
    """The processes in the noted sessions of a folder whose own process has ended.

    A session's number may be another one's by now, so the name of the folder, which no other has had, must be in their
    environment.
    """
    with suppress(OSError):
        sessions = [int(entry.name) for entry in (folder / _SESSIONS).iterdir() if entry.name.isdecimal()]
        processes = [Process.of(pid) for session in sessions for pid in in_session(session)]
        mark = os.fsencode(f"{folder}/")
        return [process for process in processes if mark in _environment_of(process.pid)]
    return []


def end_all(processes: Sequence[Process], timeout_s: float) -> None:
    """Kills processes, and waits until they have ended, but no longer than so many seconds.

    Those of Python that remove what the others have in shared memory end by themselves, when they have done so.
    """
    tidying = [process for process in processes if "multiprocessing.resource_tracker" in command_of(process.pid)]
    deadline_s = time.monotonic() + timeout_s
    _kill([process for process in processes if process not in tidying], deadline_s)
    _wait_for(tidying, time.monotonic() + _TIDY_S)
    _kill(tidying, deadline_s)


def _kill(processes: Sequence[Process], until_s: float) -> None:
    for process in processes:
        with suppress(OSError):  # of another user by now
            process.signal(signal.SIGKILL)
    _wait_for(processes, until_s)


def _wait_for(processes: Sequence[Process], until_s: float) -> None:
    while not all(process.has_ended for process in processes) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
