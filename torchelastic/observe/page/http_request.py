"""An HTTP request's head as a value, and what it asks for. Pure; nothing in it is trusted.

HTTP/1.1 as far as a page needs it (RFC 9112): GET only, no body, one request per connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

#: The longest head that is read.
MOST_HEAD_BYTES = 16_384

_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}) (/[\x21-\x7e]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*?)[ \t]*")
#: Those of which a second one would let two readers understand two things.
_ONCE = ("host", "authorization", "sec-fetch-site", "content-length")


class HttpError(Exception):
    """The request is not answered as it wants to be.

    Args:
        status: of HTTP.
        why: one line for people, without anything that the client has sent.
        headers: to send besides the usual ones.
    """

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {why}")
        self.status, self.why, self.headers = status, why, dict(headers or {})


@dataclass(frozen=True)
class PageRequest:
    """A GET.

    Attributes:
        path: decoded, begins with a slash; without its query, which nothing here has.
        headers: by name in lower case.
    """

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


def parsed(head: bytes) -> PageRequest:
    """The request that these bytes are, without the empty line at their end. Raises Refused."""
    line, *rest = head.decode("latin-1").split("\r\n")
    words = _REQUEST_LINE.fullmatch(line)
    if words is None:
        raise HttpError(400, "this is no HTTP/1.1 request")
    method, target = words.groups()
    if method != "GET":
        raise HttpError(405, "only GET is answered: nothing can be changed here", {"Allow": "GET"})
    headers: dict[str, str] = {}
    for text in rest:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise HttpError(400, "a header that is none")
        name, value = header[1].lower(), header[2]
        if name in headers and name in _ONCE:
            raise HttpError(400, f"{name} is there twice")
        headers[name] = value
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise HttpError(400, "a GET has no body here")
    path = target.partition("#")[0].partition("?")[0]
    try:
        return PageRequest(unquote(path, errors="strict"), headers)
    except ValueError:
        raise HttpError(400, "the address is not UTF-8") from None


# --- what is asked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What a request asks for.

    Attributes:
        kind: `file`, `status` or `events`.
        name: of the file.
    """

    kind: str
    name: str = ""

    @property
    def is_secret(self) -> bool:
        """Whether it shows something of the run; the page's own files are the same for everybody."""
        return self.kind != "file"


def wanted(request: PageRequest, files: Mapping[str, object]) -> Wanted:
    """What is asked for.

    Args:
        request: a GET.
        files: the page's files, by name.

    Raises:
        HttpError: nothing of that name is here.
    """
    name = request.path[1:] or "index.html"
    if name in files:
        return Wanted("file", name)
    if name == "status.json":
        return Wanted("status")
    if name == "events":
        return Wanted("events")
    raise HttpError(404, "there is nothing here: see /, /status.json and /events")
