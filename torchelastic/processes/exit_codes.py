"""How a process has ended, by its exit code."""

from __future__ import annotations

import signal


def describe_exit(exit_code: int | None) -> str:
    """A sentence for people.

    >>> describe_exit(1), describe_exit(-11), describe_exit(-40)
    ('exit code 1', 'killed by SIGSEGV', 'killed by signal 40')
    """
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-exit_code}"
