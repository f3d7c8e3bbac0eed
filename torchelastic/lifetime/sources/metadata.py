"""Asking the metadata service of a cloud over HTTP: short time-outs, no proxy, no redirection, back-off."""

from __future__ import annotations

import email.utils
import http.client
import logging
import time
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, ClassVar

from torchelastic.foreign_json import RecordError, decode_json
from torchelastic.lifetime.sources.notice import Event, NonsenseError, Notice, Notices, Timing

log = logging.getLogger(__name__)

#: The address at which AWS, GCP and Azure all answer, to the machine itself only.
LINK_LOCAL = "http://169.254.169.254"
#: The answers are a few hundred bytes.
_MAX_BYTES = 64 * 1024
#: So many failures in a row are told; before the first success they mean that there is no such service here.
_PROBES = 3
#: One that surely is there is given up to so long for an answer, and asked at least so often, until the first one.
_MAX_TIMEOUT_S, _MAX_PROBE_PAUSE_S = 8.0, 10.0
_MAX_PAUSE_S = 60.0


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
        """Unix seconds by the clock of the service (RFC 9110, `Date`); `wall_s` if it does not say."""
        try:
            return http_seconds(self.headers.get("date", ""))
        except NonsenseError:
            return wall_s


#: Sends a request; the argument after it: seconds. Raises NoAnswerError.
Opener = Callable[[urllib.request.Request, float], Answer]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Metadata services redirect nobody: a captive portal does."""

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
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, body, headers)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, "", {name.lower(): value for name, value in error.headers.items()})
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswerError(f"{request.full_url}: {error}") from None


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
    """Unix seconds of a date in UTC as AWS writes it, `2026-11-21T20:15:00Z`. Raises NonsenseError."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise NonsenseError(f"{_shown(text)} is no date in UTC") from None


def http_seconds(text: str) -> float:
    """Unix seconds of a date as HTTP and Azure write it, `Sat, 21 Nov 2026 20:15:00 GMT`. Raises NonsenseError."""
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        raise NonsenseError(f"{_shown(text)} is no date of HTTP") from None
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def parse_json(text: str) -> Any:
    """The value. Raises NonsenseError: it is no JSON."""
    try:
        return decode_json("the answer", text, most_bytes=_MAX_BYTES)
    except RecordError:
        raise nonsense("no JSON", text) from None


def pause_s(failures: int) -> float:
    """How long to leave a service alone after so many failures in a row: 0.5 s, 1 s, 2 s, .. up to a minute."""
    return min(_MAX_PAUSE_S, 0.5 * 2.0 ** min(failures - 1, 10))


def nonsense(what: str, text: str) -> NonsenseError:
    """An error that shows the beginning of what was answered."""
    return NonsenseError(f"{what}: {_shown(text)}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "..")


class Options(Timing, total=False):
    """What every source of this sort takes besides its own arguments, and `notice.Timing`.

    Attributes:
        timeout_s: for an answer.
        is_expected: whether the machine surely is of this cloud, so that the absence of the service is worth a warning.
        opener: sends requests.
    """

    timeout_s: float
    is_expected: bool
    opener: Opener


class MetadataSource(Notices):
    """A deadline from a metadata service. `poll` asks it; have a `Poller` call that.

    A service that fails before it was ever there is taken to be absent, and never asked again, unless it surely is
    there (`is_expected`): some answer only seconds after the machine or the pod has started (the metadata server of
    GKE), so they are asked on, and given more time to answer. Later failures do not change what it has announced.

    Args:
        endpoint: URL of the service, without a path.
        interval_s, timeout_s, is_expected, opener, clock, wall_clock: see `Options`.
    """

    #: Of the source, for people; for the warning that an expected service is not there; between two questions.
    _NAME: ClassVar[str]
    _REMEDY: ClassVar[str] = "Let this process reach 169.254.169.254"
    _INTERVAL_S: ClassVar[float]

    def __init__(
        self,
        endpoint: str = LINK_LOCAL,
        *,
        interval_s: float | None = None,
        timeout_s: float = 1.0,
        is_expected: bool = False,
        opener: Opener = open_url,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._interval_s = self._INTERVAL_S if interval_s is None else interval_s
        super().__init__(self._NAME, f"{endpoint} is asked every {self._interval_s:g} s and announces nothing")
        self._endpoint, self._timeout_s, self._is_expected = endpoint.rstrip("/"), timeout_s, is_expected
        self._opener, self._clock, self._wall_clock = opener, clock, wall_clock
        self._is_present = False
        self._failures = 0
        self._looked_s: float | None = None
        self._known: dict[Event, Notice] = {}
        request(endpoint, {})  # complains about an URL that is none

    @property
    def is_present(self) -> bool:
        """Whether the service has ever answered as it should."""
        return self._is_present

    def poll(self) -> float | None:
        """Look once; at most some requests of `timeout_s` each, or 8 s. See `poller.Poll`."""
        try:
            if not self._is_present:
                self._enter()
                self._is_present = True
                log.info("%s: %s answers", self.name, self._endpoint)
            events = self._fetch()
        except (NoAnswerError, NonsenseError) as error:
            return self._failed(error)
        if self._failures >= _PROBES:
            log.info("%s: %s answers again", self.name, self._endpoint)
        self._failures = 0
        self._announce(events)
        return self._interval_s

    @abstractmethod
    def _enter(self) -> None:
        """Find out whether the service is there. Raises NoAnswerError, NonsenseError."""

    @abstractmethod
    def _fetch(self) -> list[tuple[Event, Answer]]:
        """What is announced now, each with the answer that says so. Raises NoAnswerError, NonsenseError."""

    def _ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET", *, accepted: Collection[int] = (200,)
    ) -> Answer:
        """The answer. Raises NoAnswerError: there is none, or its status is not accepted."""
        answer = self._opener(request(self._endpoint + path, headers, method), self._patience_s())
        if answer.status not in accepted:
            raise NoAnswerError(f"{path}: HTTP {answer.status}")
        return answer

    def _patience_s(self) -> float:
        """How long to wait for an answer: longer where a service that has to be there has not answered so far."""
        if self._is_present or not self._is_expected:
            return self._timeout_s
        return min(_MAX_TIMEOUT_S, self._timeout_s * 2.0 ** min(self._failures, 10))

    def _announce(self, events: Iterable[tuple[Event, Answer]]) -> None:
        """Dates become monotonic time when they are first read, and stay what they were while they stay the same."""
        now_s, wall_s = self._clock(), self._wall_clock()
        # it may have appeared right after the last look
        since_s = now_s if self._looked_s is None else max(self._looked_s, now_s - self._interval_s)
        self._looked_s = now_s
        self._known = {
            event: self._known.get(event)
            or event.notice(self.name, now_s=now_s, appeared_s=since_s, platform_s=answer.platform_s(wall_s))
            for event, answer in events
        }
        self.tell(self._known.values())

    def _failed(self, error: Exception) -> float | None:
        self._failures += 1
        if not self._is_present and self._failures >= _PROBES:
            level = logging.WARNING if self._is_expected else logging.DEBUG
            if not self._is_expected or self._failures == _PROBES:
                going_on = "; asking on" if self._is_expected else ""
                text = "%s: no metadata service, so no notices from it%s: %s. %s"
                log.log(level, text, self.name, going_on, error, self._REMEDY)
            return min(pause_s(self._failures), _MAX_PROBE_PAUSE_S) if self._is_expected else None
        if self._is_present and self._failures == _PROBES:
            log.warning("%s: no answer that makes sense; trying on: %s", self.name, error)
        return pause_s(self._failures)
