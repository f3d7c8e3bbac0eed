"""One life of the job on one instance: started, told when its time is over, ended then."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchelastic.launch.simulation_of_instances.lives import Ending
from torchelastic.launch.simulation_of_instances.process_tree import descendants, end_all, reap
from torchelastic.processes.lifeline import dies_with_parent

#: Which life this is, counted from 1.
LIFE_VARIABLE = "TORCHELASTIC_LIFE"

#: Between two looks at the job; the second kind reads the list of all processes of the host.
_LOOK_S, _LOOK_AT_ALL_S = 0.05, 0.1


@dataclass(frozen=True)
class Host:
    """What an instance is to the simulator: clocks, and what a person is told.

    Attributes:
        clock: monotonic seconds.
        wall_clock: Unix seconds.
        sleep: waits for so many seconds.
        say: a line for people.
        look: called again and again while the job runs.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    sleep: Callable[[float], None]
    say: Callable[[str], None]
    look: Callable[[], None]


class Instance:
    """Runs a shell command for a limited time. In the inner process of the simulator, which has no other children.

    Args:
        command: for /bin/sh; it gets a session, and so a process group, of its own, and an empty standard input.
        timeout_s: from its start to SIGTERM.
        grace_s: from SIGTERM to SIGKILL.
        host: clocks and ears.
    """

    def __init__(self, command: str, timeout_s: float, grace_s: float, host: Host) -> None:
        self._command, self._timeout_s, self._grace_s, self._host = command, timeout_s, grace_s, host
        self._exit_codes: dict[int, int] = {}

    def live(self, environment: Mapping[str, str]) -> Ending:
        """One life, until no process of it is left.

        Raises:
            SurvivorsError: something of it could not be ended.
            OSError: it could not be started.
        """
        host, self._exit_codes = self._host, {}
        began_s = host.clock()
        job = subprocess.Popen(
            dies_with_parent(["/bin/sh", "-c", self._command]),
            env=dict(environment),
            stdin=subprocess.DEVNULL,  # an instance has no keyboard
            start_new_session=True,
        )
        deadline_s = began_s + self._timeout_s
        timed_out = not self._ends_by(job.pid, deadline_s)
        given_up_s = 0.0 if timed_out else max(0.0, deadline_s - host.clock())
        if timed_out:
            host.say(f"time is over: SIGTERM to process group {job.pid}")
            self._signal_group(job.pid)
            self._is_empty_by(deadline_s + self._grace_s)
        killed, ended = end_all(clock=host.clock, sleep=host.sleep)
        self._exit_codes |= ended
        host.look()
        job.returncode = self._exit_codes[job.pid]  # Popen itself must not wait: any child is reaped as it ends
        return Ending(job.returncode, host.clock() - began_s, given_up_s, timed_out, len(killed))

    def _ends_by(self, pid: int, deadline_s: float) -> bool:
        """Whether the command ends before that moment."""
        while not self._has_ended(pid):
            left_s = deadline_s - self._host.clock()
            if left_s <= 0.0:
                return False
            self._host.look()
            self._host.sleep(min(_LOOK_S, left_s))
        return True

    def _has_ended(self, pid: int) -> bool:
        self._exit_codes |= reap()
        return pid in self._exit_codes

    def _is_empty_by(self, deadline_s: float) -> bool:
        """Whether everything ends before that moment, children of the command included: a shell goes first."""
        while True:
            self._exit_codes |= reap()
            if not descendants():
                return True
            left_s = deadline_s - self._host.clock()
            if left_s <= 0.0:
                return False
            self._host.look()
            self._host.sleep(min(_LOOK_AT_ALL_S, left_s))

    def _signal_group(self, group: int) -> None:
        try:
            os.killpg(group, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has ended by itself this moment


def termination_text(unix_s: float) -> str:
    """A moment as the platform writes it: Unix seconds, as text.

    >>> termination_text(1700000000.25)
    '1700000000.250'
    """
    return f"{unix_s:.3f}"


def write_whole(path: Path, text: str) -> None:
    """Put a file in place in one step: a reader finds the old one or the new one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
