"""What a script has started and left behind goes on writing after its launcher has ended: a small process reads that.

Its standard output and error are pipes to the launcher, which would end it (SIGPIPE) once nobody reads them. The small
process writes what comes on to the launcher's own screen, and ends when no process holds such a pipe any more.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

# What cannot be written (the terminal was closed, a disk is full) is read all the same: whoever writes must not block.
_RELAY = """
import os, select, sys
targets = dict(tuple(map(int, word.split(":"))) for word in sys.argv[1:])
poll = select.poll()
for source in targets:
    poll.register(source, select.POLLIN)
while targets:
    for source, _ in poll.poll():
        try:
            piece = os.read(source, 65536)
        except BlockingIOError:
            continue
        if not piece:
            poll.unregister(source)
            del targets[source]
        while piece and targets[source] > 0:
            try:
                piece = piece[os.write(targets[source], piece):]
            except OSError:
                targets[source] = 0
"""


class Pipe(NamedTuple):
    """The reading end of a pipe that somebody may still write to; `stream`: "stdout", "stderr", or "" to hide it."""

    descriptor: int
    stream: str


def relay(pipes: Sequence[Pipe]) -> int | None:
    """Have a process of its own read them to their ends; closes them here. Returns its pid; None: there is none."""
    if not pipes:
        return None
    targets = {"stdout": 1, "stderr": 2}
    words = [f"{pipe.descriptor}:{targets.get(pipe.stream, 0)}" for pipe in pipes]
    try:
        # a session of its own, as what it reads may have: whoever ends the launcher's process group ends neither
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RELAY, *words],
            pass_fds=[pipe.descriptor for pipe in pipes],
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        log.warning("what the script has left running ends when it writes something: %s", error)
        return None
    finally:
        for pipe in pipes:
            os.close(pipe.descriptor)
    process.returncode = 0  # it outlives this process: nobody here waits for it
    return process.pid
