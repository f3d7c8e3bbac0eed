"""Sizes, times and foreign texts as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

_NAMED_RANKS = 8
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
    """How long ago something was or how long it still takes, from seconds, in one unit: for lines that often change.

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


def error_text(error: Exception) -> str:
    """An error as one line; one of the operating system without its number.

    >>> error_text(FileNotFoundError(2, "No such file or directory", "logs")), error_text(ValueError("no head"))
    ('No such file or directory: logs', 'no head')
    """
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    return " ".join(str(error).split())


def without_credentials(url: str) -> str:
    """A URL as it may be logged: no user, password or query. A path or a pattern of files stays as it is.

    >>> [without_credentials(url) for url in ("s3://key:secret@bucket/runs?token=x", "s3://bucket/part-?.txt", "a?b")]
    ['s3://bucket/runs', 's3://bucket/part-?.txt', 'a?b']
    """
    if "://" not in url:
        return url
    parts = urlsplit(url)
    pattern = "" if "=" in parts.query else parts.query
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, pattern, ""))


def without_secrets(error: Exception, url: str) -> str:
    """An error about a URL as it may be logged: without what `without_credentials` leaves out.

    >>> without_secrets(OSError("secret is no password of key"), "s3://key:secret@bucket/runs")
    'OSError: *** is no password of ***'
    >>> without_secrets(OSError("full"), "runs")
    'OSError: full'
    """
    text = f"{type(error).__name__}: {error}".replace(url, without_credentials(url))
    if "://" in url:
        user = urlsplit(url).netloc.rpartition("@")[0]
        for secret in filter(None, [user, *user.split(":"), urlsplit(url).query]):
            text = text.replace(secret, "***")
    return text


def shortlist(names: Sequence[object], most: int = 3) -> str:
    """Names with commas, no more than so many of them.

    >>> shortlist(["a", "b"], 2), shortlist([0, 1, 2, 3], 2)
    ('a, b', '0, 1 and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def listed(ranks: Sequence[int]) -> str:
    """Ranks for people.

    >>> listed([1]), listed([0, 3])
    ('rank 1', 'ranks 0, 3')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {shortlist(ranks, _NAMED_RANKS)}"


def describe_calls(calls: Sequence[str], one: str = "calls", several: str = "call") -> str:
    """Says which ranks call what, the fewest first.

    Args:
        calls: of each rank.
        one: what one rank does with it.
        several: what several do.

    >>> describe_calls(["save(5)", "load()", "save(5)"])
    'rank 1 calls load(); ranks 0, 2 call save(5)'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(call, []).append(rank)
    by_number = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[0]))
    return "; ".join(f"{listed(ranks)} {one if len(ranks) == 1 else several} {call}" for call, ranks in by_number)


def host_port(host: str, port: int) -> str:
    """Where somebody listens, as it is written in a URL: an IPv6 address in brackets, which it may have already.

    >>> host_port("node-3", 2379), host_port("::1", 80)
    ('node-3:2379', '[::1]:80')
    """
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def number_text(value: float) -> str:
    """A number that was measured: a whole one with all its digits.

    >>> number_text(1234567.0), number_text(0.123456), number_text(float("inf"))
    ('1234567', '0.1235', 'inf')
    """
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def measured_text(metrics: Mapping[str, float]) -> str:
    """What was measured, by name.

    >>> measured_text({"loss": 0.25, "global_step": 700.0})
    'global_step 700, loss 0.25'
    """
    return ", ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))


def percent(share: float) -> str:
    """A share; less than all never looks like all.

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
