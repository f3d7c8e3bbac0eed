"""The coordination store on a real etcd (v3 API over gRPC), by way of the etcd3 package.

For the agent process: it brings gRPC and its threads, and etcd3's generated code needs
PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the environment before protobuf is first imported.

etcd3's own methods are used to connect; calls go to its generated stubs, because those tell the reason of a failure
(etcd3's `_translate_exception` drops the text and half of the codes) and take a time limit per call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torchelastic.rendezvous.credentials import NO_CREDENTIALS, Credentials
from torchelastic.rendezvous.delivery import WatchCallbacks, check_start_revision, check_ttl
from torchelastic.rendezvous.etcd_connection import Connection, Failover, OnConnect
from torchelastic.rendezvous.etcd_watch import WatchStream
from torchelastic.rendezvous.etcd_wire import (
    etcd3,
    etcdrpc,
    prefix_range,
    to_bytes,
    to_compare,
    to_key_value,
    to_operation,
)
from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Delete,
    KeyValue,
    Lease,
    LeaseLostError,
    OnError,
    OnEvents,
    PrefixSnapshot,
    Put,
    StoreError,
    StoreUnavailableError,
    TxnResult,
    Watch,
)


class EtcdStore(CoordinationStore):
    """A client of one etcd cluster. Connects at the first call. Any thread may call any method.

    A call that finds its endpoint out of service goes to the next one, as far as that is safe: reads and lease calls
    always, a transaction only if it certainly was not sent. When an endpoint is given up, the watches on it end with
    StoreUnavailableError; new ones go to the new endpoint.

    Args:
        endpoints: (host, port) of the cluster's members, in the order of preference.
        timeout_s: The longest one call may take, all attempts together.
        credentials: Certificates, and a user if etcd's authentication is on; without them neither TLS nor a login.
        root: If given, a user who may not write below this key is refused at the first call already.
        on_connect: Called with the endpoint and its server's version after each new connection, by whoever calls.

    Raises:
        ValueError: no endpoints.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        timeout_s: float = 5.0,
        credentials: Credentials = NO_CREDENTIALS,
        root: str = "",
        on_connect: OnConnect = lambda _endpoint, _version: None,
    ) -> None:
        self._failover = Failover(endpoints, timeout_s, credentials, root, on_connect)
        self._lock = threading.Lock()  # guards the next two
        self._streams: set[WatchStream] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"EtcdStore({','.join(self._failover.endpoints)})"

    def get(self, key: str) -> KeyValue | None:
        """Read one key; see `CoordinationStore.get`."""
        kvs = self._range(etcdrpc.RangeRequest(key=to_bytes(key))).kvs
        return to_key_value(kvs[0]) if kvs else None

    def list_prefix(self, prefix: str) -> PrefixSnapshot:
        """Read all keys under a prefix; see `CoordinationStore.list_prefix`."""
        key, range_end = prefix_range(prefix)
        response = self._range(etcdrpc.RangeRequest(key=key, range_end=range_end))
        return PrefixSnapshot(tuple(to_key_value(kv) for kv in response.kvs), response.header.revision)

    def _range(self, request: etcdrpc.RangeRequest) -> etcdrpc.RangeResponse:
        response: etcdrpc.RangeResponse = self._call(lambda client: client.kvstub.Range, request)
        return response

    def _call(self, stub: Callable[[etcd3.Etcd3Client], Any], request: Any, *, repeatable: bool = True) -> Any:
        """One call of one of etcd's generated stubs; see `Failover.call`."""

        def call(connection: Connection, timeout_s: float) -> Any:
            return stub(connection.client)(request, timeout_s, metadata=connection.client.metadata)

        return self._failover.call(call, repeatable=repeatable)

    def txn(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Compare and write at once; see `CoordinationStore.txn`."""
        request = etcdrpc.TxnRequest(
            compare=[to_compare(compare) for compare in compares], success=[to_operation(write) for write in writes]
        )
        response = self._call(lambda client: client.kvstub.Txn, request, repeatable=not writes)
        return TxnResult(response.succeeded, response.header.revision)

    def grant_lease(self, ttl_s: float) -> Lease:
        """Obtain a lease of whole seconds; see `CoordinationStore.grant_lease`. etcd itself sets a lower bound."""
        check_ttl(ttl_s)
        request = etcdrpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        # repeating may leave a lease behind that nobody uses: it expires
        granted = self._call(lambda client: client.leasestub.LeaseGrant, request)
        return Lease(granted.ID, float(granted.TTL))

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; see `CoordinationStore.keep_alive`."""
        ttl_s = self._failover.call(lambda connection, timeout_s: _keep_alive_once(connection, lease_id, timeout_s))
        if ttl_s <= 0:  # etcd answers 0 for a lease that is gone
            raise LeaseLostError(f"lease {lease_id} has expired or was revoked")
        return ttl_s

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease; see `CoordinationStore.revoke_lease`."""
        request = etcdrpc.LeaseRevokeRequest(ID=lease_id)
        with suppress(LeaseLostError):  # gone already, which is what the caller wants
            self._call(lambda client: client.leasestub.LeaseRevoke, request)

    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        """Report changes; see `CoordinationStore.watch`. Raises StoreUnavailableError if no endpoint can be reached."""
        check_start_revision(start_revision)
        callbacks = WatchCallbacks(prefix, on_events, on_error)
        stream = self._failover.call(
            lambda connection, _timeout_s: WatchStream(connection, prefix, start_revision, callbacks, self._watch_ended)
        )
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams.add(stream)
        if closed:
            stream.cancel()
            raise StoreUnavailableError("this EtcdStore is closed")
        stream.start()
        return stream

    def _watch_ended(self, stream: WatchStream, error: StoreError | None) -> None:
        with self._lock:
            self._streams.discard(stream)
        if isinstance(error, StoreUnavailableError):
            self._failover.close_failed(stream.connection)

    def close(self) -> None:
        """End all watches and the connection; see `CoordinationStore.close`."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:  # outside the lock: this waits for running callbacks, which may be calling this store
            stream.cancel()
        self._failover.close()


def _keep_alive_once(connection: Connection, lease_id: int, timeout_s: float) -> float:
    """One renewal on a stream of its own; returns the new time to live, 0 if the lease is gone."""
    request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)
    call = connection.client.leasestub.LeaseKeepAlive(iter([request]), timeout_s, metadata=connection.client.metadata)
    for response in call:
        call.cancel()
        return float(response.TTL)
    raise StoreUnavailableError(f"etcd at {connection.endpoint} did not answer a lease renewal")
