"""Whether the kernel believes that this host's clock is kept right."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torchelastic.doctor.findings import Finding, Level

NAME = "clock"
#: What adjtimex(2) returns for a clock that nobody keeps right (TIME_ERROR of <sys/timex.h>).
_TIME_ERROR = 5
#: `struct timex` has 208 bytes on 64-bit Linux; `modes` is its first field, and 0 there only asks.
_TIMEX_BYTES = 512


def judge_clock(is_synchronised: bool | None) -> Finding:
    """What follows from what the kernel says. Pure.

    Args:
        is_synchronised: whether somebody (chrony, ntpd, systemd-timesyncd) keeps it right; None: not known.
    """
    if is_synchronised is None:
        return Finding(NAME, Level.NOTE, "the kernel does not say whether somebody keeps the clock right")
    if is_synchronised:
        return Finding(NAME, Level.OK, "the kernel says that it is kept right (NTP)")
    because = "deadlines that are told as dates, certificates and the order of lines in logs go by it"
    remedy = "start chrony or systemd-timesyncd; to compare hosts: --nnodes N on all of them at once"
    return Finding(NAME, Level.NOTE, "the kernel knows of nobody who keeps the clock right", because, remedy)


def gather_clock() -> bool | None:
    """Ask the kernel (adjtimex(2)); None where it cannot be asked."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def check() -> Sequence[Finding]:
    """Look at this host's clock."""
    return [judge_clock(gather_clock())]
