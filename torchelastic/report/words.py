"""Numbers for people."""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """A share; what is not all of it never looks as if it were.

    >>> percent(0.632), percent(0.99999), percent(0.00001), percent(1.0), percent(0.0)
    ('63.2 %', '> 99.9 %', '< 0.1 %', '100 %', '0 %')
    """
    if not math.isfinite(share):
        return "-"
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def exact(ns: int) -> str:
    """Every nanosecond.

    >>> exact(28_097_802_006)
    '28.097 802 006'
    """
    seconds, rest = divmod(abs(ns), 1_000_000_000)
    digits = f"{rest:09d}"
    return f"{'-' if ns < 0 else ''}{seconds}.{digits[:3]} {digits[3:6]} {digits[6:]}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "failure"), counted(2, "life", "lives")
    ('1 failure', '2 lives')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"
