"""What passes between members and the store, counted outside the product."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Delete,
    KeyValue,
    Lease,
    OnError,
    OnEvents,
    PrefixSnapshot,
    Put,
    StoreEvent,
    TxnResult,
    Watch,
)


class CountingStore(CoordinationStore):
    """Passes everything on to another store and counts it. Any thread may call any method.

    Bytes are those of keys and values; what gRPC adds is not in them. Signs of life are counted apart from the other
    requests: their number depends on how long a run lasts and not on what happens in it.
    """

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._largest_bytes = 0

    def take(self) -> dict[str, int]:
        """What was counted since the last time, and the largest value ever."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return {**counts, "largest_value_bytes": self._largest_bytes}

    def _count(self, values: Sequence[bytes] = (), **more: int) -> None:
        with self._lock:
            self._counts.update(more)
            self._largest_bytes = max(self._largest_bytes, *(len(value) for value in values), 0)

    def get(self, key: str) -> KeyValue | None:
        self._count(requests=1)
        return self._store.get(key)

    def list_prefix(self, prefix: str) -> PrefixSnapshot:
        listing = self._store.list_prefix(prefix)
        self._count(requests=1, read_bytes=sum(_size(kv) for kv in listing.items))
        return listing

    def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        puts = [write for write in writes if isinstance(write, Put)]
        put_bytes = sum(len(put.key) + len(put.value) for put in puts)
        self._count([put.value for put in puts], requests=1, writes=len(writes), put_bytes=put_bytes)
        return self._store.txn(compares, writes)

    def grant_lease(self, ttl_s: float) -> Lease:
        self._count(requests=1)
        return self._store.grant_lease(ttl_s)

    def keep_alive(self, lease_id: int) -> float:
        self._count(signs_of_life=1)
        return self._store.keep_alive(lease_id)

    def revoke_lease(self, lease_id: int) -> None:
        self._count(requests=1)
        self._store.revoke_lease(lease_id)

    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        def counted(events: Sequence[StoreEvent]) -> None:
            self._count(events=len(events), delivered_bytes=sum(_size(event.kv) for event in events))
            on_events(events)

        self._count(requests=1)
        return self._store.watch(prefix, start_revision, counted, on_error)

    def close(self) -> None:
        """Nothing: the members of one process share one store, which ends with the process."""


def _size(kv: KeyValue) -> int:
    return len(kv.key) + len(kv.value)
