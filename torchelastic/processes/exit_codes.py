"""How a process has ended, by its exit code."""

from __future__ import annotations

import signal

#: Of a job that has saved, has stopped before its deadline, and wants to be started again: EX_TEMPFAIL of
#: sysexits.h(3), "the user is invited to retry".
STOPPED_EARLY = 75
#: Of a launcher whose host computes wrong: it is not to be started again here before the host is repaired.
COMPUTES_WRONG = 76


def signalled(exit_code: int) -> bool:
    """Whether a signal has ended a process, or what it had started: then a shell ends with 128 and its number.

    Args:
        exit_code: as subprocess has it.

    >>> [signalled(exit_code) for exit_code in (-9, 137, 1, 75, 255)]
    [True, True, False, False, False]
    """
    return exit_code < 0 or exit_code - 128 in {int(number) for number in signal.Signals}


def describe_exit(exit_code: int | None) -> str:
    """A sentence for people.

    >>> describe_exit(-11), describe_exit(-40), describe_exit(137), describe_exit(3)
    ('killed by SIGSEGV', 'killed by signal 40', 'exit code 137 (128 + SIGKILL)', 'exit code 3')
    """
    if exit_code is not None and signalled(exit_code) and exit_code > 0:
        return f"exit code {exit_code} (128 + {signal.Signals(exit_code - 128).name})"
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-exit_code}"
