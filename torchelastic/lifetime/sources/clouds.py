"""The metadata services of AWS, GCP and Azure: what they announce, and one source of deadlines that polls them.

AWS, from the EC2 User Guide: "Spot Instance interruption notices" (`spot/instance-action` is 404 until there is a
notice, then JSON with `action` and `time`; two minutes before, at once for "hibernate"; to be polled every 5 s), "EC2
instance rebalance recommendations" (JSON with `noticeTime`), and "Use IMDSv2" (a token by PUT, valid for at most 6
hours, sent with each request).

GCP, from the Compute Engine documentation: "Query VM metadata" (header `Metadata-Flavor: Google` in request and
answer), "Spot VMs" (`instance/preempted` becomes TRUE; the machine has 30 s at best), and "Query metadata server for
maintenance event notices" (60 s before; an hour before with accelerators).

Azure, from "Scheduled Events for Linux VMs": a list of `Events`, whose `NotBefore` is blank once they have begun, and
whose `Resources` may be other machines of the same set. At least so long before: Preempt 30 s, Redeploy 10 min, Reboot
15 min, Terminate 5 to 15 min as the user has set it. The first request enables the service, which takes up to two
minutes.
"""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from torchelastic.lifetime.sources.metadata import (
    LINK_LOCAL,
    Answer,
    NoAnswerError,
    Opener,
    http_seconds,
    invalid,
    iso_seconds,
    open_url,
    parse_json,
    request,
)
from torchelastic.lifetime.sources.notice import Clocks, Event, InvalidAnswerError, Kind, Notice, Notices

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing.Unpack from Python 3.11 on; torch requires the package

log = logging.getLogger(__name__)

#: From the notice to the end of a spot machine: of EC2, and of GCP at best.
AWS_SPOT_LEAD_S, GCP_SPOT_LEAD_S = 120.0, 30.0
#: From the notice to the maintenance of a host of GCP; machines with accelerators get an hour.
MAINTENANCE_LEAD_S = 60.0
#: So many failures in a row are logged; before the first success they mean that there is no such service here.
_PROBES = 3
#: How long a service may take to answer.
_TIMEOUT_S = 1.0
#: A service that is surely there gets up to so long to answer, and is polled at least so often, until it first does.
_MAX_TIMEOUT_S, _MAX_PROBE_PAUSE_S = 8.0, 10.0
_MAX_PAUSE_S = 60.0
_AWS_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path
_AWS_TOKEN_TTL_S = 21_600
_KIND_OF_AZURE_EVENT: dict[str, Kind] = {
    "Preempt": "interruption",
    "Terminate": "interruption",
    "Reboot": "maintenance",
    "Redeploy": "maintenance",
    "Freeze": "advice",  # a pause of some seconds: memory and processes stay
}


class _SpotAction(msgspec.Struct):
    action: Literal["terminate", "stop", "hibernate"]
    time: str


class _Rebalance(msgspec.Struct, rename="camel"):
    notice_time: str


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    event_status: str
    resources: list[str]
    not_before: str | None = None


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent]


def parse_instance_action(text: str) -> Event:
    """The event in `spot/instance-action` of EC2. Raises InvalidAnswerError."""
    notice = parse_json("spot/instance-action", text, _SpotAction)
    if notice.action == "hibernate":
        return Event("interruption", "EC2 hibernates this spot instance now")
    reason = f"EC2 will {notice.action} this spot instance at {notice.time}"
    return Event("interruption", reason, iso_seconds(notice.time), AWS_SPOT_LEAD_S)


def parse_rebalance(text: str, lead_s: float | None) -> Event:
    """The event in `events/recommendations/rebalance` of EC2. Raises InvalidAnswerError.

    Args:
        text: the body.
        lead_s: leave the machine so many seconds after the advice; None: it is advice only.
    """
    date = parse_json("events/recommendations/rebalance", text, _Rebalance).notice_time
    iso_seconds(date)
    reason = f"EC2 says since {date} that this spot instance is at elevated risk of interruption"
    return Event("advice", reason) if lead_s is None else Event("interruption", reason, lead_s=lead_s)


def parse_preempted(text: str) -> Event | None:
    """The event in `instance/preempted` of GCP, TRUE or FALSE. Raises InvalidAnswerError."""
    answer = text.strip().upper()
    if answer not in ("TRUE", "FALSE"):
        raise invalid("instance/preempted is neither TRUE nor FALSE", text)
    if answer == "FALSE":
        return None
    # at best: Kubernetes on the machine gives its pods half of that
    return Event("interruption", "GCP preempts this spot machine", lead_s=GCP_SPOT_LEAD_S, is_lead_sure=False)


def parse_maintenance(text: str, lead_s: float = MAINTENANCE_LEAD_S) -> Event | None:
    """The event in `instance/maintenance-event` of GCP, so long before it; a live migration is none.

    Raises:
        InvalidAnswerError: it is none of the documented words.
    """
    word = text.strip()
    if word == "TERMINATE_ON_HOST_MAINTENANCE":
        return Event("maintenance", f"GCP says {word}", lead_s=lead_s)
    if word in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
        return None
    raise invalid("instance/maintenance-event is an unknown word", text)


def parse_scheduled_events(text: str, machine: str) -> list[Event]:
    """What Azure announces for the machine of this name; "": not known, every event counts.

    Raises:
        InvalidAnswerError: it is not what the documentation says.
    """
    found = []
    for event in parse_json("scheduledevents", text, _AzureEvents).events:
        kind = _KIND_OF_AZURE_EVENT.get(event.event_type)
        is_ours = not machine or machine.lower() in (name.lower() for name in event.resources)
        if kind is None or not is_ours or event.event_status not in ("Scheduled", "Started"):
            continue  # a type that is newer than this, another machine, or it is over
        reason = f"Azure: {event.event_type}, {event.event_status}"
        if event.event_status == "Started" or not event.not_before:
            found.append(Event(kind, reason))
        else:
            found.append(Event(kind, f"{reason}, not before {event.not_before}", http_seconds(event.not_before)))
    return found


def pause_s(failures: int) -> float:
    """How long to leave a service alone after so many failures in a row: 0.5 s, 1 s, 2 s, ... up to a minute."""
    return min(_MAX_PAUSE_S, 0.5 * 2.0 ** min(failures - 1, 10))


class Options(Clocks, total=False):
    """The options of every cloud besides its own, and `notice.Clocks`.

    Attributes:
        is_expected: whether the machine surely is of this cloud, so that the absence of the service is worth a warning.
        opener: sends requests.
    """

    is_expected: bool
    opener: Opener


class MetadataSource(Notices):
    """A deadline from a metadata service. `poll` asks it; have a `Poller` call that.

    A service that fails before its first answer is taken to be absent, and is not polled again, unless it is surely
    there (`is_expected`): some answer only seconds after the machine or the pod has started (the metadata server of
    GKE), so they are retried, with longer time-outs. Later failures do not change what was announced.

    Args:
        endpoint: URL of the service, without a path.
        is_expected, opener, clock, wall_clock: see `Options`.
    """

    #: Name for people; how to make an expected service reachable; seconds between two polls.
    _NAME: ClassVar[str]
    _REMEDY: ClassVar[str] = "Let this process reach 169.254.169.254"
    _INTERVAL_S: ClassVar[float]

    def __init__(
        self,
        endpoint: str = LINK_LOCAL,
        *,
        is_expected: bool = False,
        opener: Opener = open_url,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(self._NAME, f"{endpoint} is asked every {self._INTERVAL_S:g} s and announces nothing")
        self._endpoint, self._is_expected = endpoint.rstrip("/"), is_expected
        self._opener, self._clock, self._wall_clock = opener, clock, wall_clock
        self._is_present = False
        self._failures = 0
        self._polled_s: float | None = None
        self._known: dict[Event, Notice] = {}
        request(endpoint, {})  # raises if this is no URL

    @property
    def is_present(self) -> bool:
        """Whether the service has ever given a valid answer."""
        return self._is_present

    def poll(self) -> float | None:
        """Poll once; at most some requests of 1 s each, or 8 s. See `poller.Poll`."""
        try:
            if not self._is_present:
                self._enter()
                self._is_present = True
                log.info("%s: %s answers", self.name, self._endpoint)
            events = self._fetch()
        except (NoAnswerError, InvalidAnswerError) as error:
            return self._failed(error)
        if self._failures >= _PROBES:
            log.info("%s: %s answers again", self.name, self._endpoint)
        self._failures = 0
        self._announce([(event, answer) for event, answer in events if event is not None])
        return self._INTERVAL_S

    @abstractmethod
    def _enter(self) -> None:
        """Find out whether the service is there. Raises NoAnswerError, InvalidAnswerError."""

    @abstractmethod
    def _fetch(self) -> list[tuple[Event | None, Answer]]:
        """What is announced now, each with its answer. Raises NoAnswerError, InvalidAnswerError."""

    def _ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET", *, accepted: Collection[int] = (200,)
    ) -> Answer:
        """The answer. Raises NoAnswerError: there is none, or its status is not accepted."""
        timeout_s = _TIMEOUT_S
        if self._is_expected and not self._is_present:
            timeout_s = min(_MAX_TIMEOUT_S, timeout_s * 2.0 ** min(self._failures, 10))
        answer = self._opener(request(self._endpoint + path, headers, method), timeout_s)
        if answer.status not in accepted:
            raise NoAnswerError(f"{path}: HTTP {answer.status}")
        return answer

    def _announce(self, events: list[tuple[Event, Answer]]) -> None:
        """Dates become monotonic time when they are first read, and stay what they were while they stay the same."""
        now_s, wall_s = self._clock(), self._wall_clock()
        # it may have appeared right after the last poll
        since_s = now_s if self._polled_s is None else max(self._polled_s, now_s - self._INTERVAL_S)
        self._polled_s = now_s
        self._known = {
            event: self._known.get(event)
            or event.notice(self.name, now_s=now_s, appeared_s=since_s, platform_s=answer.platform_s(wall_s))
            for event, answer in events
        }
        self.tell(self._known.values())

    def _failed(self, error: Exception) -> float | None:
        self._failures += 1
        if self._is_present or self._failures < _PROBES:
            if self._failures == _PROBES:
                log.warning("%s: no valid answer; retrying: %s", self.name, error)
            return pause_s(self._failures)
        if not self._is_expected:
            log.debug("%s: no metadata service: %s", self.name, error)
            return None
        if self._failures == _PROBES:
            text = "%s: no metadata service, so no notices from it; retrying: %s. %s"
            log.warning(text, self.name, error, self._REMEDY)
        return min(pause_s(self._failures), _MAX_PROBE_PAUSE_S)


class AwsSpot(MetadataSource):
    """Spot interruption and rebalance recommendation of the instance this process runs on.

    Args:
        endpoint: of the instance metadata service.
        rebalance_lead_s: stop so many seconds after a rebalance recommendation; None: only log it, since it often is
            followed by nothing.
        options: see `Options`. Polled every 5 s, as AWS recommends.
    """

    _NAME = "AWS spot"
    _INTERVAL_S = 5.0
    _REMEDY = (
        "In a container, let the token pass one more hop: `aws ec2 modify-instance-metadata-options "
        "--http-put-response-hop-limit 2`"
    )

    def __init__(
        self, endpoint: str = LINK_LOCAL, *, rebalance_lead_s: float | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(endpoint, **options)
        self._rebalance_lead_s = rebalance_lead_s
        self._token, self._token_until_s = "", 0.0

    def _enter(self) -> None:
        asked_s = self._clock()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_TTL_S)}
        token = self._ask(_AWS_TOKEN_PATH, headers, "PUT").body
        if not re.fullmatch(r"[\x21-\x7e]{1,1024}", token):
            raise InvalidAnswerError(f"{_AWS_TOKEN_PATH} answers with {len(token)} characters that are no token")
        self._token, self._token_until_s = token, asked_s + _AWS_TOKEN_TTL_S / 2

    def _fetch(self) -> list[tuple[Event | None, Answer]]:
        action = self._get("spot/instance-action")
        rebalance = self._get("events/recommendations/rebalance")
        return [
            (parse_instance_action(action.body) if action.status == 200 else None, action),
            (parse_rebalance(rebalance.body, self._rebalance_lead_s) if rebalance.status == 200 else None, rebalance),
        ]

    def _get(self, path: str) -> Answer:
        if self._clock() >= self._token_until_s:
            self._enter()
        headers = {"X-aws-ec2-metadata-token": self._token}
        try:
            return self._ask(f"/latest/meta-data/{path}", headers, accepted=(200, 404))
        except NoAnswerError:
            self._token_until_s = 0.0  # 401: it is no longer valid
            raise


class GcpPreemption(MetadataSource):
    """Preemption and host maintenance of the machine this process runs on.

    Args:
        endpoint: of the metadata server. Its address and not its name: a name server that hangs cannot be timed out.
        maintenance_lead_s: from the notice to a maintenance that stops the machine.
        options: see `Options`. Polled every 2 s: spot machines have 30 s in all.
    """

    _NAME = "GCP preemption"
    _INTERVAL_S = 2.0
    _REMEDY = "Let this process reach 169.254.169.254 (on GKE: the metadata server of the node)"

    def __init__(
        self, endpoint: str = LINK_LOCAL, *, maintenance_lead_s: float = MAINTENANCE_LEAD_S, **options: Unpack[Options]
    ) -> None:
        super().__init__(endpoint, **options)
        self._maintenance_lead_s = maintenance_lead_s

    def _enter(self) -> None:
        self._get("preempted")

    def _fetch(self) -> list[tuple[Event | None, Answer]]:
        preempted, maintenance = self._get("preempted"), self._get("maintenance-event")
        return [
            (parse_preempted(preempted.body), preempted),
            (parse_maintenance(maintenance.body, self._maintenance_lead_s), maintenance),
        ]

    def _get(self, path: str) -> Answer:
        answer = self._ask(f"/computeMetadata/v1/instance/{path}", {"Metadata-Flavor": "Google"})
        if answer.headers.get("metadata-flavor") != "Google":
            raise invalid(f"{path}: the answer is not Google's", answer.body)
        return answer


class AzureScheduledEvents(MetadataSource):
    """Eviction, redeployment, reboot and termination of the machine this process runs on.

    Events are not acknowledged: Azure then waits for their date, so that all of the time can be used.

    Args:
        endpoint: of the instance metadata service.
        machine: name of this machine; "": the service is asked for it.
        options: see `Options`. Polled every 2 s: evictions come with 30 s.
    """

    _NAME = "Azure scheduled events"
    _INTERVAL_S = 2.0

    def __init__(self, endpoint: str = LINK_LOCAL, *, machine: str = "", **options: Unpack[Options]) -> None:
        super().__init__(endpoint, **options)
        self._machine = machine

    def _enter(self) -> None:
        name = self._get("instance/compute/name?api-version=2021-02-01&format=text").body.strip()
        if not re.fullmatch(r"[\w.-]{1,256}", name, re.ASCII):
            raise invalid("no name of a machine", name)
        self._machine = self._machine or name

    def _fetch(self) -> list[tuple[Event | None, Answer]]:
        answer = self._get("scheduledevents?api-version=2020-07-01")
        return [(event, answer) for event in parse_scheduled_events(answer.body, self._machine)]

    def _get(self, path: str) -> Answer:
        return self._ask(f"/metadata/{path}", {"Metadata": "true"})
