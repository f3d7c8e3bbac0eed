"""What a host's part in a run asks of the world: requests that are awaited, and carried out elsewhere.

`Host` is written as coroutines that await these requests and nothing else: no socket, no thread, no clock. The agent
carries them out on a real store (`torchelastic.agent.membership`), the simulator on a simulated one: both run the same
code. (The idea is known as sans-IO, https://sans-io.readthedocs.io.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Delete,
    KeyValue,
    Lease,
    PrefixSnapshot,
    Put,
    StoreError,
    StoreEvent,
    TxnResult,
)

T = TypeVar("T")


class Request(Generic[T]):
    """Something that whoever runs the coroutine has to do; awaiting it gives the answer, or raises StoreError."""

    def __await__(self) -> Generator[Request[T], T, T]:
        """Hand the request out and take the answer in."""
        answer: T = yield self
        return answer


class Ask(Request[T]):
    """One call of the store.

    Args:
        name: the store's method, for traces and counters.
        call: does it; it may block.
    """

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[[CoordinationStore], T]) -> None:
        self.name, self.call = name, call

    def __repr__(self) -> str:
        return f"Ask({self.name})"


@dataclass(frozen=True)
class OpenWatch(Request[None]):
    """Put every change under `prefix` from `start_revision` on into the inbox, and the watch's failure too."""

    prefix: str
    start_revision: int


@dataclass(frozen=True)
class EndWatches(Request[None]):
    """End all watches and empty the inbox; nothing of theirs comes afterwards."""


@dataclass(frozen=True)
class Receive(Request["Sequence[Message]"]):
    """Wait until something is in the inbox, or until that time by the host's clock; gives all that is there."""

    until_s: float | None = None


@dataclass(frozen=True)
class Sleep(Request[None]):
    """Let time pass."""

    seconds: float


@dataclass(frozen=True)
class Failed:
    """A watch or a sign of life failed: the session has to start over."""

    error: StoreError


@dataclass(frozen=True)
class Changed:
    """There is something to write."""


Message = Sequence[StoreEvent] | Failed | Changed


def get(key: str) -> Ask[KeyValue | None]:
    """See `CoordinationStore.get`."""
    return Ask("get", lambda store: store.get(key))


def list_prefix(prefix: str) -> Ask[PrefixSnapshot]:
    """See `CoordinationStore.list_prefix`."""
    return Ask("list", lambda store: store.list_prefix(prefix))


def txn(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> Ask[TxnResult]:
    """See `CoordinationStore.txn`."""
    return Ask("txn", lambda store: store.txn(compares, writes))


def grant_lease(ttl_s: float) -> Ask[Lease]:
    """See `CoordinationStore.grant_lease`."""
    return Ask("grant_lease", lambda store: store.grant_lease(ttl_s))


def keep_alive(lease_id: int) -> Ask[float]:
    """See `CoordinationStore.keep_alive`."""
    return Ask("keep_alive", lambda store: store.keep_alive(lease_id))


def revoke_lease(lease_id: int) -> Ask[None]:
    """See `CoordinationStore.revoke_lease`."""
    return Ask("revoke_lease", lambda store: store.revoke_lease(lease_id))
