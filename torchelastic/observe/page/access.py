"""Who may see the page: whoever has its token. Pure.

Three dangers: somebody on the network, another user of this host, and a web page in the browser of somebody who may
see it. None of them has the token. Against the third there are also the rules about `Host` (a name that somebody has
made to point here: DNS rebinding) and `Sec-Fetch-Site` (a page of another site that opens streams).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from torchelastic.observe.page.http_request import HttpError, PageRequest, Wanted

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
        token: without it nothing of the run is shown.
        names: that this host goes by, in lower case, besides addresses and `localhost`.
    """

    token: str = field(repr=False)
    names: Collection[str] = ()

    def check(self, request: PageRequest, wanted: Wanted) -> None:
        """Let it pass, or raise Refused.

        Args:
            request: what came.
            wanted: what it asks for.
        """
        self._check_host(request.headers.get("host"))
        if not wanted.is_secret:
            return
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpError(403, "this was asked for by a page of another site")
        self._check_token(request.headers.get("authorization", ""))

    def _check_host(self, host: str | None) -> None:
        parts = None if host is None else _HOST.fullmatch(host)
        if parts is None:
            raise HttpError(400, "the header Host is missing, or is none")
        name = parts[1].lower().removesuffix(".")
        # this host may have several names: node-1, node-1.cluster, ..
        known = name in self.names or name.partition(".")[0] in self.names
        if not (name == "localhost" or known or _is_address(name)):
            raise HttpError(
                403, "this host does not go by that name: use its address, or name it with --page NAME:PORT"
            )

    def _check_token(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token.encode())
        if scheme.lower() != "bearer" or not right:
            why = "a token is wanted: it was printed at the start of the run, or the file that holds it was named there"
            raise HttpError(401, why, {"WWW-Authenticate": "Bearer"})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
