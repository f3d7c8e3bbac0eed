"""Who may see the page. Pure.

Three dangers: somebody on the network, another user of this host, and a web page in the browser of somebody who may
see it. Against the first there is a token; against the second the kernel, which knows whose a connection is (or a
token); against the third the rules about `Host` (a name that somebody has made to point here: DNS rebinding) and
`Sec-Fetch-Site` (a page of another site that opens streams, although it could not read them).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from torchelastic.page.requests import PageRequest, Refused, Wanted

#: No token is shorter.
LEAST_TOKEN = 16
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/=-]{{{LEAST_TOKEN},512}}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")


def new_token() -> str:
    """A token that nobody can guess: 192 random bits."""
    return secrets.token_urlsafe(24)


def checked_token(text: str) -> str:
    """A token from a file. Raises ValueError: it is none, or could be guessed."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token has {LEAST_TOKEN} to 512 letters, digits or any of . _ ~ + / = -, on one line")
    return token


@dataclass(frozen=True)
class Access:
    """Who may see what.

    Attributes:
        token: without it nothing of the run is shown; None: the kernel decides (`uid`).
        names: that this host goes by, in lower case, besides addresses and `localhost`.
        uid: the user whose connections are served where there is no token; and root's.
    """

    token: str | None = field(repr=False)
    names: Collection[str] = ()
    uid: int = 0

    def check(self, request: PageRequest, wanted: Wanted, peer_uid: int | None) -> None:
        """Let it pass, or raise Refused.

        Args:
            request: what came.
            wanted: what it asks for.
            peer_uid: whose connection it is; None: not known.
        """
        self._check_host(request.headers.get("host"))
        if not wanted.is_secret:
            return
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(403, "this was asked for by a page of another site")
        if self.token is not None:
            self._check_token(request.headers.get("authorization", ""))
        elif peer_uid not in (0, self.uid):
            whose = "of another user" if peer_uid is not None else "of a user whom the kernel does not name"
            raise Refused(403, f"this connection is {whose}: start the run with --page-token-file to share its page")

    def _check_host(self, host: str | None) -> None:
        parts = None if host is None else _HOST.fullmatch(host)
        if parts is None:
            raise Refused(400, "the header Host is missing, or is none")
        name = parts[1].lower().removesuffix(".")
        # with a token a name is no danger, and this host may have several: node-1, node-1.cluster, ..
        known = name in self.names or (self.token is not None and name.partition(".")[0] in self.names)
        if not (name == "localhost" or known or _is_address(name)):
            raise Refused(403, "this host does not go by that name: use its address, or name it with --page NAME:PORT")

    def _check_token(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), (self.token or "").encode())
        if scheme.lower() != "bearer" or not right:
            why = "a token is wanted: open the address that was printed at the start, with #token=.. at its end"
            raise Refused(401, why, {"WWW-Authenticate": "Bearer"})


def is_loopback(address: str) -> bool:
    """Whether only this host can reach that address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("::1"), is_loopback("localhost")
    (True, False, True, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
