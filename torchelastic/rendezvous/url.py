"""`etcd://host[:port][,host...]/run_id?min_workers=..`: what a rendezvous URL says, checked once, with clear errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from torchelastic.rendezvous.protocol import Settings

DEFAULT_PORT = 2379
#: Not 0.1's `/torchelastic/p2p`: that was etcd's v2 key space, which no present etcd shares with v3.
DEFAULT_PREFIX = "/torchelastic"
#: etcd grants no lease below 1.5 election time-outs, about 2 s.
SMALLEST_TTL_S = 2.0


class RendezvousUrlError(ValueError):
    """A rendezvous URL that cannot be used; the message names the part and the remedy."""


@dataclass(frozen=True)
class RendezvousUrl:
    """A rendezvous URL, taken apart.

    Attributes:
        endpoints: (host, port) of the etcd members, tried in this order.
        run_id: names the run; every worker of a run uses the same.
        min_workers: no group is smaller.
        max_workers: no group is larger; more wait as spares.
        timeout_s: how long a worker waits for a group before it gives up.
        last_call_timeout_s: how long the first group waits for more after each arrival, from `min_workers` on.
        ttl_s: how long a host may be silent before it counts as lost.
        connect_timeout_s: how long etcd may be unreachable at the start.
        etcd_prefix: everything of the project stands below this key.
    """

    endpoints: tuple[tuple[str, int], ...]
    run_id: str
    min_workers: int
    max_workers: int
    timeout_s: float = 600.0
    last_call_timeout_s: float = 30.0
    ttl_s: float = 10.0
    connect_timeout_s: float = 30.0
    etcd_prefix: str = DEFAULT_PREFIX

    @property
    def root(self) -> str:
        """The key under which all of this run stands, without a slash at its end."""
        return f"{self.etcd_prefix.rstrip('/')}/{self.run_id}"

    @property
    def settings(self) -> Settings:
        """What the membership protocol needs of it."""
        return Settings(self.min_workers, self.max_workers, self.last_call_timeout_s)

    @property
    def endpoints_text(self) -> str:
        """The endpoints as HOST:PORT,HOST:PORT for people."""
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)

    def __str__(self) -> str:
        query = {
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "timeout": self.timeout_s,
            "last_call_timeout": self.last_call_timeout_s,
            "ttl": self.ttl_s,
            "connect_timeout": self.connect_timeout_s,
            "etcd_prefix": self.etcd_prefix,
        }
        return f"etcd://{self.endpoints_text}/{quote(self.run_id, safe='')}?{urlencode(query)}"


_SECONDS = {
    "timeout": "timeout_s",
    "last_call_timeout": "last_call_timeout_s",
    "ttl": "ttl_s",
    "connect_timeout": "connect_timeout_s",
}
PARAMETERS = ("min_workers", "max_workers", *_SECONDS, "etcd_prefix")


def parse_url(url: str) -> RendezvousUrl:
    """Take a rendezvous URL apart.

    Raises:
        RendezvousUrlError: another scheme, no host, no run id, an unknown or repeated parameter, a value that is no
            number or out of range, min above max. The message names the part.
    """
    parts = urlsplit(url)
    if parts.scheme != "etcd":
        raise RendezvousUrlError(
            f"{url!r}: the scheme is {parts.scheme!r}; write etcd://HOST:PORT/RUN_ID?min_workers=N"
        )
    run_id = unquote(parts.path.strip("/"))
    if not run_id:
        raise RendezvousUrlError(f"{url!r} names no run: write etcd://HOST:PORT/RUN_ID?min_workers=N")
    if not re.fullmatch(r"[\w.:@+-]+", run_id):
        raise RendezvousUrlError(
            f"run id {run_id!r}: use letters, digits and _ . : @ + - only, it becomes part of a key"
        )
    query = _parse_query(url, parts.query)
    min_workers = _whole(query, "min_workers", None)
    max_workers = _whole(query, "max_workers", min_workers)
    if max_workers < min_workers:
        raise RendezvousUrlError(
            f"max_workers={max_workers} is below min_workers={min_workers}: raise max or lower min"
        )
    seconds = {field: _positive_s(query, name) for name, field in _SECONDS.items() if name in query}
    ttl_s = seconds.get("ttl_s", 10.0)
    if ttl_s < SMALLEST_TTL_S:
        raise RendezvousUrlError(f"ttl={ttl_s:g} is below the {SMALLEST_TTL_S:g} s that etcd can do: raise it")
    return RendezvousUrl(
        endpoints=_parse_endpoints(url, parts.netloc),
        run_id=run_id,
        min_workers=min_workers,
        max_workers=max_workers,
        etcd_prefix=query.get("etcd_prefix", DEFAULT_PREFIX),
        **seconds,
    )


def _parse_endpoints(url: str, netloc: str) -> tuple[tuple[str, int], ...]:
    endpoints = []
    for part in netloc.split(","):
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]@]+)(?::(\d+))?", part)
        if match is None:
            raise RendezvousUrlError(f"{url!r}: {part!r} is no HOST or HOST:PORT")
        port = int(match.group(2) or DEFAULT_PORT)
        if not 0 < port < 65536:
            raise RendezvousUrlError(f"{url!r}: port {port} is not between 1 and 65535")
        endpoints.append((match.group(1).strip("[]"), port))
    return tuple(endpoints)


def _parse_query(url: str, text: str) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    query = dict(pairs)
    if len(query) < len(pairs):
        raise RendezvousUrlError(f"{url!r} gives a parameter twice")
    unknown = sorted(set(query) - set(PARAMETERS))
    if unknown:
        raise RendezvousUrlError(f"unknown parameter {unknown[0]!r} in {url!r}: known are {', '.join(PARAMETERS)}")
    return query


def _whole(query: dict[str, str], name: str, default: int | None) -> int:
    if name not in query:
        if default is None:
            raise RendezvousUrlError(f"the rendezvous URL lacks {name}: add ?{name}=N")
        return default
    if not re.fullmatch(r"\d+", query[name]) or int(query[name]) < 1:
        raise RendezvousUrlError(f"{name}={query[name]!r} must be a whole number of at least 1")
    return int(query[name])


def _positive_s(query: dict[str, str], name: str) -> float:
    try:
        value = float(query[name])
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise RendezvousUrlError(f"{name}={query[name]!r} must be a number of seconds above 0")
    return value
