"""What a worker reads from its standard input: nothing, or the launcher's terminal, for a debugger."""

from __future__ import annotations

import os
import subprocess


def worker_stdin(nproc: int) -> int | None:
    """What `subprocess.Popen` takes as `stdin`; None: the terminal of this launcher.

    A single worker of a launcher in the foreground of a terminal gets that: `breakpoint()` and `input()` work. Several
    would read each other's lines. The kernel stops no reader for being in the background of a terminal that is not its
    session's: so a worker, which has a session of its own, may read, and Ctrl-C stays the launcher's.

    Args:
        nproc: how many workers the launcher has.
    """
    return None if nproc == 1 and _is_in_foreground() else subprocess.DEVNULL


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal, not that of this session, or closed
        return False
