"""Keys, leases and history as etcd v3 has them, as plain data: what the store in memory and the simulated one stand on.

The semantics are etcd's (https://etcd.io/docs/v3.5/learning/data_model/).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchelastic.rendezvous.delivery import compacted_error
from torchelastic.rendezvous.store import (
    Compare,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreError,
    StoreEvent,
    Target,
)

MIN_TTL_S = 2
"""The shortest lease etcd grants with its default election timeout (1 s): one and a half of it, in whole seconds."""

_NOTHING = KeyValue(key="", value=b"", create_revision=0, mod_revision=0, version=0)


@dataclass
class LeaseState:
    """A lease and the keys that go with it."""

    ttl_s: float
    expires_at_s: float
    keys: set[str] = field(default_factory=set)


class Tree:
    """The data of one store. No lock, no thread and no clock: `now_s` is always an argument."""

    def __init__(self) -> None:
        self.revision = 1  # that of an empty etcd: the first write makes revision 2
        self.keys: dict[str, KeyValue] = {}
        self._sorted: list[str] = []
        self.leases: dict[int, LeaseState] = {}
        self._compacted_revision = 0
        self._history: list[tuple[StoreEvent, ...]] = []  # entry i holds the changes of revision _oldest + i
        self._oldest = 2

    def under(self, prefix: str) -> tuple[KeyValue, ...]:
        """What stands under a prefix, ordered by key."""
        start = bisect.bisect_left(self._sorted, prefix)
        found = itertools.takewhile(lambda key: key.startswith(prefix), itertools.islice(self._sorted, start, None))
        return tuple(self.keys[key] for key in found)

    def holds(self, compare: Compare) -> bool:
        """Whether a comparison is true now."""
        kv = self.keys.get(compare.key, _NOTHING)
        actual: dict[Target, int | bytes | None] = {
            Target.CREATE_REVISION: kv.create_revision,
            Target.MOD_REVISION: kv.mod_revision,
            Target.VERSION: kv.version,
            Target.VALUE: kv.value if kv.version else None,  # as in etcd, equal to no value
        }
        return actual[compare.target] == compare.value

    def apply(self, writes: Sequence[Put | Delete]) -> tuple[StoreEvent, ...]:
        """Do the writes as one revision; writes that change nothing make no revision."""
        for write in writes:
            if isinstance(write, Put) and write.lease_id and write.lease_id not in self.leases:
                raise LeaseLostError(f"lease {write.lease_id} of key {write.key!r} has expired or was revoked")
        revision = self.revision + 1
        changes = [
            self._put(write, revision) if isinstance(write, Put) else self._delete(write.key, revision)
            for write in writes
        ]
        events = tuple(event for event in changes if event is not None)
        if events:
            self.revision = revision
            self._history.append(events)
        return events

    def _put(self, put: Put, revision: int) -> StoreEvent:
        old = self.keys.get(put.key, _NOTHING)
        if old.lease_id in self.leases:
            self.leases[old.lease_id].keys.discard(put.key)
        if put.lease_id:
            self.leases[put.lease_id].keys.add(put.key)
        if old is _NOTHING:
            bisect.insort(self._sorted, put.key)
        created = old.create_revision or revision
        kv = KeyValue(put.key, put.value, created, revision, old.version + 1, put.lease_id)
        self.keys[put.key] = kv
        return StoreEvent(EventKind.PUT, kv)

    def _delete(self, key: str, revision: int) -> StoreEvent | None:
        old = self.keys.pop(key, None)
        if old is None:
            return None
        del self._sorted[bisect.bisect_left(self._sorted, key)]
        if old.lease_id in self.leases:
            self.leases[old.lease_id].keys.discard(key)
        return StoreEvent(EventKind.DELETE, KeyValue(key, b"", 0, revision, 0))

    def grant(self, lease_id: int, ttl_s: float, now_s: float) -> None:
        """Begin a lease."""
        self.leases[lease_id] = LeaseState(ttl_s, now_s + ttl_s)

    @property
    def history_length(self) -> int:
        """How many revisions back a watch may begin."""
        return len(self._history)

    def end_lease(self, lease_id: int) -> tuple[StoreEvent, ...]:
        """Forget a lease; all its keys go in one revision."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return ()
        events = self.apply([Delete(key) for key in sorted(lease.keys)])
        del self.leases[lease_id]
        return events

    def expired(self, now_s: float) -> list[int]:
        """The leases whose time is over, longest overdue first."""
        due = [(lease.expires_at_s, lease_id) for lease_id, lease in self.leases.items() if lease.expires_at_s <= now_s]
        return [lease_id for _, lease_id in sorted(due)]

    def renew(self, lease_id: int, now_s: float) -> float:
        """Give a lease its full time again, in seconds. Raises LeaseLostError."""
        if lease_id not in self.leases:
            raise LeaseLostError(f"lease {lease_id} has expired or was revoked")
        lease = self.leases[lease_id]
        lease.expires_at_s = now_s + lease.ttl_s
        return lease.ttl_s

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`. Raises ValueError if the store has not reached it."""
        if revision > self.revision:
            raise ValueError(f"cannot compact to revision {revision}: the store is at {self.revision}")
        self._compacted_revision = max(revision, self._compacted_revision)
        forgotten = max(0, self._compacted_revision - self._oldest)
        del self._history[:forgotten]
        self._oldest += forgotten

    def changes_from(self, start_revision: int) -> list[tuple[StoreEvent, ...]]:
        """What has happened since, one entry a revision. Raises CompactedError if that is forgotten."""
        if start_revision < self._compacted_revision:
            raise compacted_error(start_revision, self._compacted_revision)
        return self._history[max(0, start_revision - self._oldest) :]


def check_key(key: str) -> None:
    """Raise StoreError if there is no such key."""
    if not key:
        raise StoreError("a key is empty")


def check_txn(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> None:
    """Raise StoreError for what etcd refuses too: an empty key, a key that is written twice."""
    for item in (*compares, *writes):
        check_key(item.key)
    put: set[str] = set()
    for key in (write.key for write in writes if isinstance(write, Put)):
        if key in put or Delete(key) in writes:
            raise StoreError(f"key {key!r} is written twice in one transaction")
        put.add(key)
