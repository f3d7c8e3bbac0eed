"""What the membership protocol needs from a coordination store.

The vocabulary is etcd v3's (https://etcd.io/docs/v3.5/learning/api/): revisions, leases, transactions, watches.
`etcd.py` speaks to a real server; the tests' store in memory keeps the same promises: both pass one conformance suite.
All methods may be called from any thread, and block.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class StoreError(Exception):
    """Something that a store could not do."""


class StoreUnavailableError(StoreError):
    """The store did not answer (yet): the caller may try again, and must not conclude that the write had no effect."""


class LeaseLostError(StoreError):
    """The lease has expired or was revoked: every key that hung on it is gone."""


class CompactedError(StoreError):
    """A watch asked for a revision that the store no longer has: list again and watch from there."""


class StoreAccessError(StoreError):
    """The store answered and said no (wrong password, missing permission): trying again does not help."""


@dataclass(frozen=True)
class KeyValue:
    """One key as the store holds it. A revision counts the writes of the whole store, `version` those of this key."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int = 0


@dataclass(frozen=True)
class PrefixSnapshot:
    """All keys under a prefix, ordered by key, as they were at `revision`.

    Watch from `revision + 1` to miss nothing.
    """

    items: tuple[KeyValue, ...]
    revision: int


class EventKind(enum.Enum):
    """What happened to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True)
class StoreEvent:
    """A change of one key. For a deletion `kv.value` is empty and `kv.mod_revision` is the revision of the deletion."""

    kind: EventKind
    kv: KeyValue


class Target(enum.Enum):
    """Which property of a key a transaction compares."""

    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VERSION = "version"
    VALUE = "value"


@dataclass(frozen=True)
class Compare:
    """`target` of `key` equals `value`: bytes for the key's value, else a number, 0 for a key that does not exist."""

    key: str
    target: Target
    value: int | bytes


@dataclass(frozen=True)
class Put:
    """Write a key; `lease_id` 0 means that it stays until it is deleted."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    """Remove a key; removing one that does not exist is no error."""

    key: str


@dataclass(frozen=True)
class TxnResult:
    """Whether all comparisons held (only then the writes were done), and the store's revision afterwards."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Lease:
    """A promise to show signs of life. `ttl_s` is what the store granted, which may be more than was asked for."""

    lease_id: int
    ttl_s: float


OnEvents = Callable[[Sequence[StoreEvent]], None]
OnError = Callable[[StoreError], None]


class Watch(ABC):
    """A running watch."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop it. No callback starts after this has returned. Idempotent; must not be called from a callback."""


class CoordinationStore(ABC):
    """A linearizable key-value store with leases, transactions and watches."""

    @abstractmethod
    def get(self, key: str) -> KeyValue | None:
        """Read one key; None where it does not exist. Raises StoreUnavailableError."""

    @abstractmethod
    def list_prefix(self, prefix: str) -> PrefixSnapshot:
        """Read all keys that start with `prefix`, and the revision at which that was so.

        Raises StoreUnavailableError.
        """

    @abstractmethod
    def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Do all `writes` at once if all `compares` hold, else nothing.

        Raises:
            LeaseLostError: a Put names a lease that is gone; nothing was written.
            StoreUnavailableError: no answer; the writes may or may not have been done.
        """

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Write one key without a condition; returns the store's revision. Raises as `txn`."""
        return self.txn((), (Put(key, value, lease_id),)).revision

    def delete(self, key: str) -> int:
        """Remove one key; returns the store's revision. Raises as `txn`."""
        return self.txn((), (Delete(key),)).revision

    @abstractmethod
    def grant_lease(self, ttl_s: float) -> Lease:
        """Obtain a lease of at least `ttl_s` seconds (rounded up to what the store can do)."""

    @abstractmethod
    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; returns its new time to live in seconds. Raises LeaseLostError if it is gone."""

    @abstractmethod
    def revoke_lease(self, lease_id: int) -> None:
        """End a lease now; its keys are deleted. A lease that is gone already is no error."""

    @abstractmethod
    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        """Report every change under `prefix` from `start_revision` on, in order, none twice, none left out.

        The callbacks run on a thread of the store; they must return soon. After `on_error` (CompactedError or
        StoreUnavailableError) the watch is dead: list again and start a new one.
        """

    @abstractmethod
    def close(self) -> None:
        """End all watches and give up the connection. Leases live on until they expire. Idempotent."""
