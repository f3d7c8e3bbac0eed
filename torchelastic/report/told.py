"""An event of some journal, on the clock of the run."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.ledger.events import Event

#: What is told of the same round within this time of each other is one incident; rounds are numbered anew by a new job.
SAME_INCIDENT_NS = 60_000_000_000


@dataclass(frozen=True)
class Told:
    """An event of some journal.

    Attributes:
        at_ns: when, since the run began.
        event: what.
        name: its worker's, for people.
        detect_ns: of a failure: how long it was not noticed.
    """

    at_ns: int
    event: Event
    name: str
    detect_ns: int = 0
