"""The simulated store: etcd's semantics at one moment of simulated time, with its faults as verbs."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from tests.simulation.engine import Engine
from tests.simulation.tree import MIN_TTL_S, Tree, check_key, check_txn
from torchelastic.rendezvous.delivery import check_start_revision, check_ttl
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
    StoreEvent,
    StoreUnavailableError,
    TxnResult,
    Watch,
)

#: Leases are looked at this often.
LEASE_TICK_S = 0.5
#: The history is compacted when it is longer than twice this, as an etcd with auto-compaction does.
HISTORY = 500


class SimulatedWatch(Watch):
    """A watch; `deliver` and `fail` are called by the store at the moment of the change."""

    def __init__(self, store: SimulatedStore, prefix: str, on_events: OnEvents, on_error: OnError) -> None:
        self.prefix, self.on_events, self.on_error = prefix, on_events, on_error
        self._store = store

    def cancel(self) -> None:
        """No callback starts after this has returned."""
        self._store.forget(self)


class SimulatedStore(CoordinationStore):
    """Every call takes effect at once, at the engine's present time: a simulated network calls it at the right one.

    Args:
        engine: gives the time for the leases.
        on_change: called with the events of every revision, before anybody else hears of them.
    """

    def __init__(
        self, engine: Engine, on_change: Callable[[Sequence[StoreEvent]], None] = lambda _events: None
    ) -> None:
        self.tree = Tree()
        self.running = True
        self.calls: Counter[str] = Counter()
        self.bytes_put = 0
        self.largest_value_bytes = 0
        self.busy_until_s = 0.0
        #: it does nothing before that time, and says nothing; see `hang`
        self.hung_until_s = 0.0
        #: how often it was restored: what was sent to the server before does not reach the one with other data
        self.restored = 0
        self._engine, self._on_change = engine, on_change
        self._lease_ids = itertools.count(1)  # goes on after a loss of data: an old lease must not come alive again
        self._watches: defaultdict[str, list[SimulatedWatch]] = defaultdict(list)
        engine.after(LEASE_TICK_S, self._expire)

    # --- the calls ----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        """Read one key; see `CoordinationStore.get`."""
        self._serve("get")
        check_key(key)
        return self.tree.keys.get(key)

    def list_prefix(self, prefix: str) -> PrefixSnapshot:
        """Read all keys under a prefix; see `CoordinationStore.list_prefix`."""
        self._serve("list")
        return PrefixSnapshot(self.tree.under(prefix), self.tree.revision)

    def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Compare and write at once; see `CoordinationStore.txn`."""
        self._serve("txn")
        check_txn(compares, writes)
        if not all(self.tree.holds(compare) for compare in compares):
            return TxnResult(False, self.tree.revision)
        for write in writes:
            if isinstance(write, Put):
                self.bytes_put += len(write.value)
                self.largest_value_bytes = max(self.largest_value_bytes, len(write.value))
        self._publish(self.tree.apply(writes))
        return TxnResult(True, self.tree.revision)

    def grant_lease(self, ttl_s: float) -> Lease:
        """Obtain a lease; see `CoordinationStore.grant_lease`."""
        self._serve("grant_lease")
        check_ttl(ttl_s)
        granted_s = float(max(MIN_TTL_S, math.ceil(ttl_s)))
        lease_id = next(self._lease_ids)
        self.tree.grant(lease_id, granted_s, self._engine.now_s)
        return Lease(lease_id, granted_s)

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; see `CoordinationStore.keep_alive`."""
        self._serve("keep_alive")
        lease = self.tree.leases.get(lease_id)
        if lease is not None and lease.expires_at_s <= self._engine.now_s:  # as with etcd, it is too late then
            self._publish(self.tree.end_lease(lease_id))
        return self.tree.renew(lease_id, self._engine.now_s)

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease; see `CoordinationStore.revoke_lease`."""
        self._serve("revoke_lease")
        self._publish(self.tree.end_lease(lease_id))

    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        """Report changes, at the very moment; see `CoordinationStore.watch`."""
        self._serve("watch")
        check_start_revision(start_revision)
        watch = SimulatedWatch(self, prefix, on_events, on_error)
        try:
            past = self.tree.changes_from(start_revision)
        except CompactedError as error:
            on_error(error)
            return watch
        for events in past:
            self._tell(watch, events)
        self._watches[prefix].append(watch)
        return watch

    def close(self) -> None:
        """Nothing: all hosts share this store."""

    def forget(self, watch: SimulatedWatch) -> None:
        """End a watch."""
        if watch in self._watches[watch.prefix]:
            self._watches[watch.prefix].remove(watch)

    # --- faults -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """As if the server died: every watch ends, no lease expires."""
        self.running = False
        watches = [watch for watches in self._watches.values() for watch in watches]
        self._watches.clear()
        for watch in watches:
            watch.on_error(StoreUnavailableError("the simulated store was stopped"))

    def hang(self, seconds: float) -> None:
        """As if its machine stood still: nobody is answered, and leases that end in that time have ended afterwards."""
        self.hung_until_s = self._engine.now_s + seconds

    def start(self) -> None:
        """As if it came back with its data: as with etcd, every lease has its full time again."""
        self.running = True
        for lease_id in self.tree.leases:
            self.tree.renew(lease_id, self._engine.now_s)

    def backup(self) -> Tree:
        """What `restore` takes."""
        return copy.deepcopy(self.tree)

    def restore(self, backup: Tree) -> None:
        """As if it came back with other data: an older copy, or an empty tree."""
        self.stop()
        self.restored += 1
        self.tree = backup
        self.start()

    def compact(self) -> None:
        """Forget all history: a watch that wants any of it ends."""
        self.tree.compact(self.tree.revision)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _serve(self, name: str) -> None:
        self.calls[name] += 1
        if not self.running:
            raise StoreUnavailableError("the simulated store is stopped")

    def _publish(self, events: Sequence[StoreEvent]) -> None:
        if not events:
            return
        self._on_change(events)
        for prefix in tuple(self._watches):
            wanted = tuple(event for event in events if event.kv.key.startswith(prefix))
            for watch in tuple(self._watches[prefix]) if wanted else ():
                watch.on_events(wanted)
        if self.tree.history_length > 2 * HISTORY:
            self.tree.compact(self.tree.revision - HISTORY)

    def _tell(self, watch: SimulatedWatch, events: Sequence[StoreEvent]) -> None:
        wanted = tuple(event for event in events if event.kv.key.startswith(watch.prefix))
        if wanted:
            watch.on_events(wanted)

    def _expire(self) -> None:
        if self.running and self._engine.now_s >= self.hung_until_s:
            for lease_id in self.tree.expired(self._engine.now_s):
                self._engine.note("store: lease", lease_id, "expires")
                self._publish(self.tree.end_lease(lease_id))
        self._engine.after(LEASE_TICK_S, self._expire)
