"""A run as the page receives it, `run_to_plain` with objects instead of lists; and what has changed between two.

Changes are JSON Merge Patches (RFC 7396). The documents hold no nulls, which a merge patch keeps for what is gone, and
lists only where they may be sent whole. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.observe.status.run_status import RunStatus
from torchelastic.observe.status.status_format import notes_to_plain, run_to_plain

Document = dict[str, Any]

#: So many of the newest events are sent.
MOST_EVENTS = 300
#: After a message of so many bytes the next one comes a second later, after a longer one later still.
BYTES_PER_S = 40_000
#: Between two messages, at least.
LEAST_PAUSE_S = 1.0


@dataclass(frozen=True)
class About:
    """What the page receives besides the run.

    Attributes:
        host: whose agent serves it.
        version: of torchelastic.
        etcd_away_s: since when etcd has not answered, in Unix seconds; 0: it does.
    """

    host: str
    version: str = ""
    etcd_away_s: float = 0.0


def document_of(status: RunStatus, about: About) -> Document:
    """The document. What has no number (no bound, for instance) is left out: there are no nulls in it."""
    plain = run_to_plain(status)
    return {
        **plain,
        "members": _by_name(plain["members"], lambda one: str(one["member_id"])),
        "workers": _by_name(plain["workers"], lambda one: str(one["worker"])),
        "hosts": _by_name(plain["hosts"], _host),
        "silent": _by_name(plain["silent"], _host),
        "events": _by_name(plain["events"][-MOST_EVENTS:], _event),
        "figures": {
            name: {key: value for key, value in figure.items() if value is not None}
            for name, figure in plain["figures"].items()
        },
        "notes": notes_to_plain(status, is_etcd_away=bool(about.etcd_away_s)),
        "page": {"host": about.host, "version": about.version, "etcd_away_s": about.etcd_away_s},
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    """The patch that makes `new` of `old`; empty: they are the same."""
    patch: Document = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old:
            patch[name] = value
        elif isinstance(value, dict) and isinstance(old[name], dict):
            inner = difference(old[name], value)
            if inner:
                patch[name] = inner
        elif old[name] != value or type(old[name]) is not type(value):
            patch[name] = value
    return patch


def pause_s(sent_bytes: int) -> float:
    """Seconds from one message to the next, so that however large the run is, at most 40 kB are sent in a second.

    >>> pause_s(12_000), pause_s(120_000)
    (1.0, 3.0)
    """
    return max(LEAST_PAUSE_S, sent_bytes / BYTES_PER_S)


def _by_name(parts: Iterable[Document], name_of: Callable[[Document], str]) -> Document:
    """Objects by name; a name that comes again, which only a hostile host sends, gets a number."""
    named: Document = {}
    for part in parts:
        name, count = name_of(part), 1
        while name in named:
            count += 1
            name = f"{name_of(part)} #{count}"
        named[name] = part
    return named


def _host(one: Document) -> str:
    return f"{one['host']}/{one['incarnation']}"


def _event(one: Document) -> str:
    return f"{one['at_s']:.3f} {one['host']} {one['kind']} {one['worker']}"
