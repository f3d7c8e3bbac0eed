"""`etcd://host[:port][,host...]/run_id?min_workers=..`: what a rendezvous URL says, checked once, with clear errors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from torchelastic.network.interfaces import is_loopback
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, AccessParameters
from torchelastic.rendezvous.view import Settings
from torchelastic.text import host_port

DEFAULT_PORT = 2379
#: Not 0.1's `/torchelastic/p2p`: that was etcd's v2 key space, which no present etcd shares with v3.
DEFAULT_PREFIX = "/torchelastic"
#: etcd grants no lease below 1.5 election time-outs, about 2 s.
SMALLEST_TTL_S = 2.0
#: What `orphan_timeout` says for a time without end; no other time may be without end.
UNLIMITED = "unlimited"


class RendezvousUrlError(ValueError):
    """A rendezvous URL that cannot be used; the message names the part and the remedy, and has no password in it."""


@dataclass(frozen=True)
class RendezvousUrl:
    """A rendezvous URL, taken apart. Neither its `str` nor its `repr` has a password in it.

    Attributes:
        endpoints: (host, port) of the etcd members, tried in this order.
        run_id: names the run; every worker of a run uses the same.
        min_workers: no group is smaller.
        max_workers: no group is larger; more wait as spares.
        multiple_of: the size of every group is a multiple of it; who is over waits as a spare.
        timeout_s: how long a worker waits for a group before it gives up.
        last_call_timeout_s: how long the first group waits for more after each arrival, from `min_workers` on.
        ttl_s: how long a host may be silent before it counts as lost.
        connect_timeout_s: how long etcd may be unreachable at the start.
        orphan_timeout_s: how long a group may train without contact to etcd; math.inf: as long as it takes.
        etcd_prefix: all keys of the project are below this one.
        access: certificates, user and password, as far as the URL names them; see `credentials.resolve`.
    """

    endpoints: tuple[tuple[str, int], ...]
    run_id: str
    min_workers: int
    max_workers: int
    timeout_s: float = 600.0
    last_call_timeout_s: float = 30.0
    ttl_s: float = 10.0
    connect_timeout_s: float = 30.0
    orphan_timeout_s: float = 300.0
    multiple_of: int = 1
    etcd_prefix: str = DEFAULT_PREFIX
    access: AccessParameters = field(default_factory=AccessParameters)

    @property
    def root(self) -> str:
        """The key under which all of this run is stored, without a slash at its end."""
        return f"{self.etcd_prefix.rstrip('/')}/{self.run_id}"

    @property
    def settings(self) -> Settings:
        """What the membership protocol needs of it."""
        return Settings(
            self.min_workers,
            self.max_workers,
            self.last_call_timeout_s,
            ttl_s=self.ttl_s,
            orphan_timeout_s=self.orphan_timeout_s,
            multiple_of=self.multiple_of,
        )

    @property
    def endpoints_text(self) -> str:
        """The endpoints as HOST:PORT,HOST:PORT for people."""
        return ",".join(host_port(host, port) for host, port in self.endpoints)

    @property
    def is_on_this_host(self) -> bool:
        """Whether all endpoints are addresses of this host alone, which no name but localhost is taken for."""
        return all(host == "localhost" or is_loopback(host) for host, _ in self.endpoints)

    def __str__(self) -> str:
        query = {name: getattr(self, name) for name in (*_COUNTS, "etcd_prefix")}
        query |= {name: getattr(self, attribute) for name, attribute in _SECONDS.items()}
        if math.isinf(self.orphan_timeout_s):
            query["orphan_timeout"] = UNLIMITED
        access = {name: getattr(self.access, name) for name in ACCESS_PARAMETERS}  # the password is none of them
        query |= {name: value for name, value in access.items() if value is not None}
        return f"etcd://{self.endpoints_text}/{quote(self.run_id, safe='')}?{urlencode(query)}"


_COUNTS = ("min_workers", "max_workers", "multiple_of")
_SECONDS = {
    "timeout": "timeout_s",
    "last_call_timeout": "last_call_timeout_s",
    "ttl": "ttl_s",
    "connect_timeout": "connect_timeout_s",
    "orphan_timeout": "orphan_timeout_s",
}
#: What a URL may say about access, besides `user:password@`.
ACCESS_PARAMETERS = ("protocol", "cacert", "cert", "key", "user", "password_file")
PARAMETERS = (*_COUNTS, *_SECONDS, "etcd_prefix", *ACCESS_PARAMETERS)

_HOW = "write etcd://HOST:PORT/RUN_ID?min_workers=N"
_ESCAPES = "and in a user's name or password / as %2F, ? as %3F, # as %23, [ as %5B, % as %25"
_HOST = r"(\[[0-9a-fA-F:.]+\]|[^:\[\]@,\s]+)(?::(\d+))?"
_ENDPOINTS = f"{_HOST}(?:,{_HOST})*"
_RUN_ID = r"[\w.:@+-]+"
_AUTHORITY = r"[^/?#]*//([^/?#]*)"
_IN_BRACKETS = r"\[[0-9a-fA-F:.]+\]"


def parse_url(url: str) -> RendezvousUrl:
    """Take a rendezvous URL apart.

    Raises:
        RendezvousUrlError: another scheme, no host, no run id, an unknown or repeated parameter, a value that is no
            number or out of range, min above max, no usable size between them, a password where it does not belong. The
            message names the part.
    """
    parts = _split(url)
    if parts.scheme != "etcd":
        raise RendezvousUrlError(f"{_masked(url)!r}: the scheme is {parts.scheme!r}; {_HOW}")
    run_id = unquote(parts.path.strip("/"))
    if not run_id:
        raise RendezvousUrlError(f"{_masked(url)!r} names no run: {_HOW}")
    if not re.fullmatch(_RUN_ID, run_id):
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
    multiple_of = _whole(query, "multiple_of", 1)
    if not Settings(min_workers, max_workers, multiple_of=multiple_of).usable(max_workers):
        raise RendezvousUrlError(
            f"multiple_of={multiple_of}: no multiple of it lies between min_workers={min_workers} and "
            f"max_workers={max_workers}: no group could ever be formed; raise max_workers or lower min_workers"
        )
    seconds = {attribute: _positive_s(query, name) for name, attribute in _SECONDS.items() if name in query}
    ttl_s = seconds.get("ttl_s", 10.0)
    if ttl_s < SMALLEST_TTL_S:
        raise RendezvousUrlError(f"ttl={ttl_s:g} is below the {SMALLEST_TTL_S:g} s that etcd can do: raise it")
    return RendezvousUrl(
        endpoints=_parse_endpoints(parts.netloc.rpartition("@")[2]),
        run_id=run_id,
        min_workers=min_workers,
        max_workers=max_workers,
        multiple_of=multiple_of,
        etcd_prefix=query.get("etcd_prefix", DEFAULT_PREFIX),
        access=_parse_access(parts.netloc, query),
        **seconds,
    )


def _masked(url: str) -> str:
    """A URL for people: whatever is where a password may be is `***`. It need not be one that can be used."""
    url = re.sub(r"(//[^:@/?#]*):.*@", r"\1:***@", url, flags=re.DOTALL)
    return re.sub(r"((?:pass|pw|secret|token)[^&=]*=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def _split(url: str) -> SplitResult:
    """The URL's parts; refuses one whose password may have been cut in two, before any of it gets into a message."""
    try:
        parts = _parts(url)
    except ValueError:  # its text may have the user and the password in it
        raise RendezvousUrlError(f"the rendezvous URL cannot be read: {_HOW}, {_ESCAPES}") from None
    behind = url.split("//", 1)[-1][len(parts.netloc) :]
    host_is_plain = re.fullmatch(_ENDPOINTS, parts.netloc.rpartition("@")[2])
    path_is_plain = re.fullmatch(_RUN_ID, unquote(parts.path.strip("/")))
    if "@" in behind and (parts.fragment or not host_is_plain or not path_is_plain):
        raise RendezvousUrlError(f"the rendezvous URL has an '@' where none can be: {_HOW}, {_ESCAPES}")
    return parts


def _parts(url: str) -> SplitResult:
    """As `urlsplit` has them, which since Python 3.14 (and 3.13.2) takes an address in brackets for the only one."""
    authority = re.match(_AUTHORITY, url)
    if authority is None or "," not in authority[1]:
        return urlsplit(url)
    userinfo, at, hosts = authority[1].rpartition("@")
    parts = urlsplit(
        f"{url[: authority.start(1)]}{userinfo}{at}{re.sub(_IN_BRACKETS, 'six', hosts)}{url[authority.end(1) :]}"
    )
    return parts._replace(netloc=authority[1])


def _parse_access(netloc: str, query: dict[str, str]) -> AccessParameters:
    access = AccessParameters(**{name: query[name] for name in ACCESS_PARAMETERS if query.get(name)})
    if access.protocol not in (None, "http", "https"):
        raise RendezvousUrlError(f"protocol={access.protocol!r} must be http or https")
    userinfo, at, _ = netloc.rpartition("@")
    if not at:
        return access
    user, colon, password = (unquote(part) for part in userinfo.partition(":"))
    if not user:
        raise RendezvousUrlError("the rendezvous URL has no user before its '@': write user:password@HOST:PORT")
    if access.user not in (None, user):
        raise RendezvousUrlError(f"the rendezvous URL names two users, {user!r} and {access.user!r}: leave one out")
    return replace(access, user=user, password=password if colon else None)


def _parse_endpoints(netloc: str) -> tuple[tuple[str, int], ...]:
    endpoints = []
    for part in netloc.split(","):
        match = re.fullmatch(_HOST, part)
        if match is None:
            raise RendezvousUrlError(f"{part!r} is no HOST or HOST:PORT")
        port = int(match.group(2) or DEFAULT_PORT)
        if not 0 < port < 65536:
            raise RendezvousUrlError(f"{part!r}: the port is not between 1 and 65535")
        endpoints.append((match.group(1).strip("[]"), port))
    return tuple(endpoints)


def _parse_query(url: str, text: str) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    query = dict(pairs)
    if len(query) < len(pairs):
        raise RendezvousUrlError(f"{_masked(url)!r} gives a parameter twice")
    unknown = sorted(set(query) - set(PARAMETERS))
    if "password" in unknown:
        raise RendezvousUrlError(
            "a password does not belong into a URL's parameters: use password_file=FILE, or the environment's "
            f"{PASSWORD_VARIABLE}"
        )
    if unknown:
        raise RendezvousUrlError(
            f"unknown parameter {unknown[0]!r} in {_masked(url)!r}: known are {', '.join(PARAMETERS)}"
        )
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
    may_be_unlimited = name == "orphan_timeout"
    if may_be_unlimited and query[name] == UNLIMITED:
        return math.inf
    try:
        value = float(query[name])
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        alternative = f", or the word {UNLIMITED}" if may_be_unlimited else ""
        raise RendezvousUrlError(f"{name}={query[name]!r} must be a number of seconds above 0{alternative}")
    return value
