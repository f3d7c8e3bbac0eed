"""HTTP requests to the metadata service of a cloud: short time-outs, no proxy, no redirection, bounded answers."""

from __future__ import annotations

import email.message
import email.utils
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeVar

from torchelastic.foreign_json import RecordError, converted, decode_json
from torchelastic.lifetime.sources.notice import InvalidAnswerError

#: The address at which AWS, GCP and Azure all answer, to the machine itself only.
LINK_LOCAL = "http://169.254.169.254"
#: The answers are a few hundred bytes.
_MAX_BYTES = 64 * 1024

T = TypeVar("T")


class NoAnswerError(Exception):
    """The service cannot be reached, does not answer in time, or refuses."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer.

    Args:
        status: its code.
        body: as text; "" for errors.
        headers: by lower-case name.
    """

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def platform_s(self, wall_s: float) -> float:
        """Unix seconds by the clock of the service (RFC 9110, `Date`); `wall_s` if the answer has no date."""
        try:
            return http_seconds(self.headers.get("date", ""))
        except InvalidAnswerError:
            return wall_s


#: Sends a request; the second argument: seconds. Raises NoAnswerError.
Opener = Callable[[urllib.request.Request, float], Answer]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Metadata services never redirect; a captive portal does."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        return None


# a proxy would answer for its own machine
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def open_url(request: urllib.request.Request, timeout_s: float) -> Answer:
    """Send a request and read the answer, whatever its status.

    Args:
        request: the request.
        timeout_s: for each wait, and for the whole body.

    Raises:
        NoAnswerError: no connection, no answer in time, or none in HTTP.
    """
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            body = _read(response, time.monotonic() + timeout_s)
            return Answer(response.status, body, _by_lower_case(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, "", _by_lower_case(error.headers))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswerError(f"{request.full_url}: {error}") from None


def _by_lower_case(headers: email.message.Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _read(response: http.client.HTTPResponse, until_s: float) -> str:
    parts: list[bytes] = []
    while part := response.read1(_MAX_BYTES):
        parts.append(part)
        if sum(map(len, parts)) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        if time.monotonic() > until_s:
            raise TimeoutError("the answer does not end")
    return b"".join(parts).decode(errors="replace")


def request(url: str, headers: Mapping[str, str], method: str = "GET") -> urllib.request.Request:
    """A request. Raises ValueError: the URL is none of HTTP."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the metadata service is {url!r}: give an URL that begins with http://")
    return urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - checked above


def iso_seconds(text: str) -> float:
    """Unix seconds of a date in UTC as AWS writes it, `2026-11-21T20:15:00Z`. Raises InvalidAnswerError."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise invalid("no date in UTC", text) from None


def http_seconds(text: str) -> float:
    """Unix seconds of a date as HTTP and Azure write it, `Sat, 21 Nov 2026 20:15:00 GMT`. Raises InvalidAnswerError."""
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        raise invalid("no date of HTTP", text) from None
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def parse_json(what: str, text: str, kind: type[T]) -> T:
    """The JSON of an answer as a value of a type. Raises InvalidAnswerError: it does not fit, or is no JSON."""
    try:
        return converted(what, decode_json(what, text, most_bytes=_MAX_BYTES), kind)
    except RecordError as error:
        raise invalid(str(error), text) from None


def invalid(what: str, text: str) -> InvalidAnswerError:
    """An error that shows the beginning of what was answered."""
    return InvalidAnswerError(f"{what}: {text if len(text) <= 60 else text[:60] + '...'!r}")
