"""Azure: scheduled events.

Protocol, from the Azure documentation "Scheduled Events for Linux VMs": header `Metadata: true`; a list of `Events`,
each with `EventType`, `EventStatus`, `NotBefore` (blank once it has begun) and the `Resources` that it is for, which
may be other machines of the same set. At least so long before: Preempt 30 s, Redeploy 10 min, Reboot 15 min, Terminate
5 to 15 min as the user has set it. The very first question switches the service on, which takes up to two minutes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchelastic.lifetime.sources.metadata import (
    LINK_LOCAL,
    Answer,
    MetadataSource,
    Options,
    http_seconds,
    nonsense,
    parse_json,
)
from torchelastic.lifetime.sources.notice import Event, Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing.Unpack from Python 3.11 on; torch requires the package

_HEADERS = {"Metadata": "true"}
_EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_NAME = re.compile(r"[\w.-]{1,256}", re.ASCII)
_KIND_OF_TYPE: dict[str, Kind] = {
    "Preempt": "interruption",
    "Terminate": "interruption",
    "Reboot": "maintenance",
    "Redeploy": "maintenance",
    "Freeze": "advice",  # a pause of some seconds: memory and processes stay
}


def parse_scheduled_events(text: str, machine: str) -> list[Event]:
    """What the service announces for a machine.

    Args:
        text: the body.
        machine: its name; "": not known, every event counts.

    Raises:
        NonsenseError: it is not what the documentation says.
    """
    answer = parse_json(text)
    try:
        found = [_event(entry, machine) for entry in answer["Events"]]
    except (LookupError, TypeError, AttributeError):
        raise nonsense("no JSON object with a list of 'Events'", text) from None
    return [event for event in found if event is not None]


def _event(entry: dict[str, Any], machine: str) -> Event | None:
    kind = _KIND_OF_TYPE.get(entry["EventType"])
    status, resources = entry["EventStatus"], [str(name).lower() for name in entry["Resources"]]
    is_ours = not machine or machine.lower() in resources
    if kind is None or not is_ours or status not in ("Scheduled", "Started"):
        return None  # a type that is newer than this, another machine, or it is over
    not_before = str(entry.get("NotBefore") or "")
    reason = f"Azure: {entry['EventType']}, {status}"
    if status == "Started" or not not_before:
        return Event(kind, reason)
    return Event(kind, f"{reason}, not before {not_before}", http_seconds(not_before))


class AzureScheduledEvents(MetadataSource):
    """Eviction, redeployment, reboot and termination of the machine this process runs on.

    Events are not acknowledged: Azure then waits for their date, so that all of the time can be used.

    Args:
        endpoint: of the instance metadata service.
        machine: name of this machine; "": the service is asked for it.
        options: see `metadata.Options`. Asked every 2 s: evictions come with 30 s.
    """

    _NAME = "Azure scheduled events"
    _INTERVAL_S = 2.0

    def __init__(self, endpoint: str = LINK_LOCAL, *, machine: str = "", **options: Unpack[Options]) -> None:
        super().__init__(endpoint, **options)
        self._machine = machine

    def _enter(self) -> None:
        name = self._ask(_NAME_PATH, _HEADERS).body.strip()
        if not _NAME.fullmatch(name):
            raise nonsense("the name of the machine is none", name)
        self._machine = self._machine or name

    def _fetch(self) -> list[tuple[Event, Answer]]:
        answer = self._ask(_EVENTS_PATH, _HEADERS)
        return [(event, answer) for event in parse_scheduled_events(answer.body, self._machine)]
