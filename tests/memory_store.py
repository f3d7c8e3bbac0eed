"""A coordination store inside this process, with etcd v3's promises and with faults on command.

For tests and simulations: time is an argument, and nothing happens that the test did not ask for. The semantics are
etcd's (https://etcd.io/docs/v3.5/learning/api/ and `learning/data_model/`); `tests/cluster/test_store_conformance.py`
holds this and a real etcd to the same suite.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from tests.simulation.tree import MIN_TTL_S, Tree, check_key, check_txn
from torchelastic.rendezvous.delivery import WatchCallbacks, check_start_revision, check_ttl
from torchelastic.rendezvous.store import (
    CompactedError,
    Compare,
    CoordinationStore,
    Delete,
    KeyValue,
    Lease,
    OnError,
    OnEvents,
    PrefixSnapshot,
    Put,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    TxnResult,
    Watch,
)


class _MemoryWatch(Watch):
    """A queue and the thread that empties it, so that a writer never runs a watcher's code."""

    def __init__(
        self, prefix: str, start_revision: int, callbacks: WatchCallbacks, on_end: Callable[[_MemoryWatch], None]
    ) -> None:
        self._prefix = prefix
        self._start_revision = start_revision
        self._callbacks = callbacks
        self._on_end = on_end
        self._queue: SimpleQueue[tuple[StoreEvent, ...] | StoreError | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"memory-watch-{prefix}", daemon=True).start()

    def offer(self, events: Sequence[StoreEvent]) -> None:
        """Queue those of a revision's changes that this watch is about."""
        wanted = tuple(
            event
            for event in events
            if event.kv.key.startswith(self._prefix) and event.kv.mod_revision >= self._start_revision
        )
        if wanted:
            self._queue.put(wanted)

    def fail(self, error: StoreError) -> None:
        """Queue the end; what was queued before is still delivered."""
        self._queue.put(error)

    def cancel(self) -> None:
        self._callbacks.end()
        self._queue.put(None)
        self._on_end(self)

    def _run(self) -> None:
        alive = True
        while alive:
            item = self._queue.get()
            if isinstance(item, tuple):
                alive = self._callbacks.deliver(item)
            else:
                alive = False
                if item is not None:
                    self._callbacks.fail(item)
        self._on_end(self)


class _Shared:
    """What all handles on one store have in common. `lock` guards everything in here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.tree = Tree()
        self.running = True
        self.lease_ids = itertools.count(1)
        self.watches: list[_MemoryWatch] = []

    def publish(self, events: Sequence[StoreEvent]) -> None:
        if events:
            for watch in self.watches:
                watch.offer(events)

    def expire_due(self) -> None:
        if self.running:
            for lease_id in self.tree.expired(self.clock()):
                self.publish(self.tree.end_lease(lease_id))

    def fail_watches(self, reason: str) -> None:
        for watch in self.watches:
            watch.fail(StoreUnavailableError(reason))
        self.watches.clear()

    def forget(self, watch: _MemoryWatch) -> None:
        with self.lock:
            if watch in self.watches:
                self.watches.remove(watch)


class MemoryStore(CoordinationStore):
    """A store in this process, for tests; `connect` gives further clients of the same data.

    A lease that is due is ended by the next call of any client, or by `expire_due`. Callbacks of a watch run on a
    thread of that watch. Any thread may call any method.

    Args:
        clock: Monotonic seconds, for the leases.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._attach(_Shared(clock))

    def _attach(self, shared: _Shared) -> None:
        self._shared = shared
        self._watches: list[_MemoryWatch] = []
        self._closed = False

    def connect(self) -> MemoryStore:
        """Another client of the same data; closing it ends only its own watches."""
        other = MemoryStore.__new__(MemoryStore)
        other._attach(self._shared)
        return other

    @contextmanager
    def _serving(self) -> Iterator[Tree]:
        with self._shared.lock:
            if self._closed:
                raise StoreUnavailableError("this client of the in-memory store is closed")
            if not self._shared.running:
                raise StoreUnavailableError("the in-memory store is stopped")
            self._shared.expire_due()
            yield self._shared.tree

    def get(self, key: str) -> KeyValue | None:
        """Read one key; see `CoordinationStore.get`."""
        with self._serving() as tree:
            check_key(key)
            return tree.keys.get(key)

    def list_prefix(self, prefix: str) -> PrefixSnapshot:
        """Read all keys under a prefix; see `CoordinationStore.list_prefix`."""
        with self._serving() as tree:
            return PrefixSnapshot(tree.under(prefix), tree.revision)

    def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Compare and write at once; see `CoordinationStore.txn`."""
        with self._serving() as tree:
            check_txn(compares, writes)
            if not all(tree.holds(compare) for compare in compares):
                return TxnResult(False, tree.revision)
            self._shared.publish(tree.apply(writes))
            return TxnResult(True, tree.revision)

    def grant_lease(self, ttl_s: float) -> Lease:
        """Obtain a lease of whole seconds, `MIN_TTL_S` at least; see `CoordinationStore.grant_lease`."""
        check_ttl(ttl_s)
        with self._serving() as tree:
            granted_s = float(max(MIN_TTL_S, math.ceil(ttl_s)))
            lease_id = next(self._shared.lease_ids)
            tree.grant(lease_id, granted_s, self._shared.clock())
            return Lease(lease_id, granted_s)

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; see `CoordinationStore.keep_alive`."""
        with self._serving() as tree:
            return tree.renew(lease_id, self._shared.clock())

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease; see `CoordinationStore.revoke_lease`."""
        with self._serving() as tree:
            self._shared.publish(tree.end_lease(lease_id))

    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        """Report changes; see `CoordinationStore.watch`."""
        check_start_revision(start_revision)
        with self._serving() as tree:
            callbacks = WatchCallbacks(prefix, on_events, on_error)
            watch = _MemoryWatch(prefix, start_revision, callbacks, self._forget)
            try:
                for events in tree.changes_from(start_revision):
                    watch.offer(events)
            except CompactedError as error:
                watch.fail(error)
                return watch
            self._shared.watches.append(watch)
            self._watches.append(watch)
            return watch

    def _forget(self, watch: _MemoryWatch) -> None:
        with self._shared.lock:
            self._shared.forget(watch)
            if watch in self._watches:
                self._watches.remove(watch)

    def close(self) -> None:
        """End this client's watches; the data and the other clients stay."""
        with self._shared.lock:
            if self._closed:
                return
            self._closed = True
            watches = list(self._watches)
        for watch in watches:  # outside the lock: this waits for running callbacks, which may be calling a store
            watch.cancel()

    # Faults, for tests ----------------------------------------------------------------------------------------------

    def expire_due(self) -> None:
        """End every lease whose time is over by the clock, as etcd does by itself."""
        with self._shared.lock:
            self._shared.expire_due()

    def stop(self) -> None:
        """As if the server died: every call and every watch gets StoreUnavailableError, and no lease expires."""
        with self._shared.lock:
            self._shared.running = False
            self._shared.fail_watches("the in-memory store was stopped")

    def start(self) -> None:
        """As if the server came back with its data: as with etcd, every lease has its full time again."""
        with self._shared.lock:
            self._shared.running = True
            for lease_id in self._shared.tree.leases:
                self._shared.tree.renew(lease_id, self._shared.clock())

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`; a watch that starts there gets CompactedError.

        Raises:
            ValueError: the store has not reached that revision.
        """
        with self._shared.lock:
            self._shared.tree.compact(revision)
