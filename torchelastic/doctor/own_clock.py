"""Whether this host's clock is synchronized: the kernel's state, which `timedatectl` and chrony show too."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torchelastic.doctor.findings import Finding, Level

NAME = "clock"
#: What adjtimex(2) returns for a clock that is not synchronized (TIME_ERROR of <sys/timex.h>).
_TIME_ERROR = 5
#: `struct timex` has 208 bytes on 64-bit Linux; `modes` is its first field, and 0 there only asks.
_TIMEX_BYTES = 512


def judge_clock(is_synchronized: bool | None, hosts: int = 1) -> Finding:
    """What follows from what the kernel says. Pure.

    Args:
        is_synchronized: whether chrony, ntpd or systemd-timesyncd synchronizes it; None: not known.
        hosts: of the run.
    """
    if is_synchronized is None:
        return Finding(NAME, Level.NOTE, "the kernel does not say whether the clock is synchronized")
    if is_synchronized:
        return Finding(NAME, Level.OK, "synchronized (NTP), says the kernel")
    because = "deadlines given as dates, certificates and the order of lines in logs depend on it"
    remedy = "start chrony or systemd-timesyncd; `chronyc tracking` or `timedatectl` shows its state"
    level = Level.NOTE if hosts == 1 else Level.WARNING
    return Finding(NAME, level, "not synchronized (NTP), says the kernel", because, remedy)


def gather_clock() -> bool | None:
    """Ask the kernel (adjtimex(2)); None where it cannot be asked."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def check(hosts: int) -> Sequence[Finding]:
    """Look at this host's clock."""
    return [judge_clock(gather_clock(), hosts)]
