"""What happens on a host, as values; the parts of its agent publish them and act on them, and know each other no more.

Everything runs on the agent's event loop. Only facts are events: what somebody asks and waits for an answer to is a
call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchelastic.agent.causes import FailedWorker
    from torchelastic.agent.worker import Worker
    from torchelastic.observe.ledger.ledger_events import LedgerEvent
    from torchelastic.rendezvous.records import Member, Round
    from torchelastic.rendezvous.wire import FoundWrong
    from torchelastic.rendezvous.worker_rules import Contact

# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundChanged:
    """The run's round is another one, or in another state."""

    round: Round


@dataclass(frozen=True)
class StoreAnswered:
    """The store has answered a sign of life, which was sent at this time by the clock of the boot; what that allows."""

    sent_s: float
    contact: Contact


@dataclass(frozen=True)
class StoreReach:
    """The store does not answer any more, or does again."""

    in_reach: bool


# --- members, by what they say over their connections -----------------------------------------------------------------


@dataclass(frozen=True)
class MemberDeclared:
    """A member of this host is new, or says something new of itself."""

    member: Member


@dataclass(frozen=True)
class MemberWithdrawn:
    """A member of this host is gone; `for_good`: it is not started again."""

    member_id: str
    for_good: bool = False


@dataclass(frozen=True)
class MemberWaits:
    """A member has begun to wait for a group."""

    member_id: str


@dataclass(frozen=True)
class WaitTimedOut:
    """A member has waited for a group for longer than the run allows; the message says what to change."""

    member_id: str
    message: str


# --- workers, by their processes --------------------------------------------------------------------------------------


class Statement(enum.Enum):
    """What a worker has said of itself."""

    ASKS = enum.auto()  # for a group, whether it gets one or not
    FINISHED = enum.auto()
    CAME_LATE = enum.auto()  # to another run than this agent's, which was closed already
    FAILS_FOR_GOOD = enum.auto()  # its error would come again in another process


@dataclass(frozen=True)
class WorkerSaid:
    """A worker, or a process that it has started to train in its place, with its place on this host, if known."""

    said: Statement
    pid: int
    local_rank: int | None


@dataclass(frozen=True)
class WorkerComputesWrong:
    """A worker was found to compute wrong in a step: it has left the run, and is not started again here."""

    pid: int
    local_rank: int | None
    found: FoundWrong


@dataclass(frozen=True)
class MetricsPublished:
    """A worker has published (group, name, value), ..; its local rank is None without the launcher."""

    local_rank: int | None
    items: list[Any]


@dataclass(frozen=True)
class WorkerLeaves:
    """The worker with this process is to leave the run, or stops before a deadline, however it then ends."""

    pid: int
    local_rank: int | None = None


@dataclass(frozen=True)
class ProcessDied:
    """A worker's process is known to be dead, as soon as that is known; maybe more than once."""

    pid: int


@dataclass(frozen=True)
class WorkerExited:
    """The process of a worker, with this pid, has ended and is not reaped yet; restarts of all workers until now."""

    worker: Worker
    pid: int
    total_restarts: int


@dataclass(frozen=True)
class WorkerFailed:
    """What has failed: all that the worker had said was read, and it is known whether it is started again."""

    failed: FailedWorker


@dataclass(frozen=True)
class WorkerNotRestarted:
    """The worker that had this process has failed and is not started again."""

    pid: int


# --- the ledger -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LedgerWritten:
    """An event of the ledger, but no counts, and when it was, in Unix seconds."""

    at_s: float
    event: LedgerEvent


@dataclass(frozen=True)
class LedgerSampled:
    """The workers' pages have been read, as they are every second."""


Event = (
    RoundChanged | StoreAnswered | StoreReach
    | MemberDeclared | MemberWithdrawn | MemberWaits | WaitTimedOut
    | WorkerSaid | WorkerComputesWrong | MetricsPublished | WorkerLeaves | ProcessDied | WorkerExited | WorkerFailed
    | WorkerNotRestarted
    | LedgerWritten | LedgerSampled
)  # fmt: skip
Publish = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """What to publish to where nobody listens."""


class Dispatcher:
    """Hands each event to every subscriber at once, in the order of their subscriptions."""

    def __init__(self) -> None:
        self._subscribers: list[Publish] = []

    def subscribe(self, on_event: Publish) -> None:
        """Have it called with each event from now on; it passes over those that do not concern it."""
        self._subscribers.append(on_event)

    def publish(self, event: Event) -> None:
        """Let all know."""
        for on_event in self._subscribers:
            on_event(event)
