"""Sizes, times and foreign texts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_LONG = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def bytes_text(size_bytes: float) -> str:
    """A size, with binary units and three digits.

    >>> bytes_text(64 * 2**20), bytes_text(1.5 * 2**30), bytes_text(12)
    ('64.0 MiB', '1.50 GiB', '12 B')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        size = size_bytes / 2**exponent
        if size >= 1.0:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}" if size >= 10 else f"{size:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def duration(ns: float) -> str:
    """How long something took, from nanoseconds.

    >>> duration(0), duration(362_400_000), duration(28_097_802_006), duration(725_000_000_000)
    ('0 s', '362 ms', '28.1 s', '12 min 5 s')
    """
    seconds = ns / 1e9
    if not ns:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else "1 s"
    for size, name, smaller, smaller_name in _LONG:
        whole = round(seconds / smaller)
        if whole * smaller >= size:
            rest = whole - whole * smaller // size * (size // smaller)
            return f"{whole * smaller // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def age_text(age_s: float) -> str:
    """How long ago something was, from seconds, in one unit: for columns and for lines that change each second.

    >>> age_text(7200.0), age_text(59.0)
    ('2.0 h', '59 s')
    """
    for size_s, unit, _, _ in _LONG:
        if age_s >= size_s:
            return f"{age_s / size_s:.1f} {unit}"
    return f"{max(age_s, 0.0):.0f} s"


def escaped(text: str) -> str:
    r"""A foreign text as one line that no terminal obeys: what cannot be printed is written as escapes.

    >>> escaped("job7\n\x1b[2J")
    'job7\\n\\x1b[2J'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable(text: str) -> str:
    """A foreign text that may have several lines: all but their ends is `escaped`."""
    return "\n".join(map(escaped, text.split("\n")))


def shortlist(names: Sequence[object], most: int = 3) -> str:
    """Names with commas, no more than so many of them.

    >>> shortlist(["a", "b"], 2), shortlist([0, 1, 2, 3], 2)
    ('a, b', '0, 1 and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
