"""GCP: preemption of a spot machine, and maintenance of its host that stops it.

Protocol, from the Compute Engine documentation: "Query VM metadata" (header `Metadata-Flavor: Google` in the request
and in the answer), "Spot VMs" (`instance/preempted` becomes TRUE; the machine has 30 s at best), and "Query metadata
server for maintenance event notices" (`instance/maintenance-event`: NONE, MIGRATE_ON_HOST_MAINTENANCE or
TERMINATE_ON_HOST_MAINTENANCE; 60 s before, an hour before with accelerators).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lifetime.sources.metadata import LINK_LOCAL, Answer, MetadataSource, Options, nonsense
from torchelastic.lifetime.sources.notice import Event

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing.Unpack from Python 3.11 on; torch requires the package

_FLAVOR = {"Metadata-Flavor": "Google"}
_PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
_MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
#: From the notice to the end of a spot machine, at best.
SPOT_LEAD_S = 30.0
#: From the notice to the maintenance of the host; machines with accelerators get an hour.
MAINTENANCE_LEAD_S = 60.0


def parse_preempted(text: str) -> Event | None:
    """What `instance/preempted` says: TRUE or FALSE. Raises NonsenseError: something else."""
    answer = text.strip().upper()
    if answer not in ("TRUE", "FALSE"):
        raise nonsense("instance/preempted is neither TRUE nor FALSE", text)
    if answer == "FALSE":
        return None
    # at best: Kubernetes on the machine gives its pods half of that
    return Event("interruption", "GCP preempts this spot machine", lead_s=SPOT_LEAD_S, is_lead_sure=False)


def parse_maintenance(text: str, lead_s: float = MAINTENANCE_LEAD_S) -> Event | None:
    """What `instance/maintenance-event` says; a live migration is no deadline, and is not reported.

    Args:
        text: the body.
        lead_s: seconds from the notice to the maintenance.

    Raises:
        NonsenseError: it is none of the documented words.
    """
    word = text.strip()
    if word == "TERMINATE_ON_HOST_MAINTENANCE":
        return Event("maintenance", f"GCP says {word}", lead_s=lead_s)
    if word in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
        return None
    raise nonsense("instance/maintenance-event is an unknown word", text)


class GcpPreemption(MetadataSource):
    """Preemption and host maintenance of the machine this process runs on.

    Args:
        endpoint: of the metadata server. Its address and not its name: a name server that hangs cannot be timed out.
        maintenance_lead_s: from the notice to a maintenance that stops the machine.
        options: see `metadata.Options`. Asked every 2 s: spot machines have 30 s in all.
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
        self._get(_PREEMPTED_PATH)

    def _fetch(self) -> list[tuple[Event, Answer]]:
        preempted, maintenance = self._get(_PREEMPTED_PATH), self._get(_MAINTENANCE_PATH)
        found = [
            (parse_preempted(preempted.body), preempted),
            (parse_maintenance(maintenance.body, self._maintenance_lead_s), maintenance),
        ]
        return [(event, answer) for event, answer in found if event is not None]

    def _get(self, path: str) -> Answer:
        answer = self._ask(path, _FLAVOR)
        if answer.headers.get("metadata-flavor") != "Google":
            raise nonsense(f"{path}: the answer is not Google's", answer.body)
        return answer
