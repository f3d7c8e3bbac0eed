"""One connection to one of several etcd endpoints, and the way to the next one when it fails.

etcd3 0.12 connects to a single endpoint and stays there. Here a connection is retired at the first sign that its
endpoint does not serve (no answer, no leader, stream broken); the next call connects anew, to the next endpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.etcd_handshake import why_no_handshake
from torchelastic.rendezvous.etcd_wire import (
    etcd3,
    etcdrpc,
    grpc,
    is_stale_login,
    to_compare,
    to_operation,
    to_store_error,
    was_not_sent,
)
from torchelastic.rendezvous.store import (
    Compare,
    Put,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    Target,
)
from torchelastic.text import host_port

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pings find a peer that vanished without a word (SIGSTOP, unplugged) while a watch is silent. etcd drops clients that
# ping more often than every 5 s, or without an open stream (--grpc-keepalive-min-time).
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 5.0

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", int(PING_INTERVAL_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(PING_TIMEOUT_S * 1000)),
    # a ping of gRPC's own may be on its way already; then this limit counts (default 60 s) and not the one above
    ("grpc.http2.ping_timeout_ms", int(PING_TIMEOUT_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),  # else gRPC stops after two pings on a silent watch
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the old one's back-off
    ("grpc.enable_http_proxy", 0),  # as etcd's own clients: a web proxy does not lead to the cluster's network
    ("grpc.max_receive_message_length", -1),  # a listing of a big run may exceed gRPC's 4 MiB
)


@dataclass(frozen=True, eq=False)
class Connection:
    """A client whose endpoint has answered."""

    client: etcd3.Etcd3Client
    endpoint: str
    version: str = ""


OnConnect = Callable[[str, str], None]


class _TryNext(Exception):  # noqa: N818 - not an error but the signal that another attempt is worth it
    def __init__(self, if_last: StoreError) -> None:
        super().__init__(str(if_last))
        self.if_last = if_last


class Failover:
    """Runs calls on the current connection; changes the endpoint when it must. Any thread may call any method.

    Args:
        endpoints: (host, port) in the order of preference.
        timeout_s: The longest a call may take, all its attempts together.
        credentials: Certificates and user.
        root: If given, whoever logs in must be allowed to write below this key: else no connection is made.
        on_connect: Called with the endpoint and its server's version after each new connection.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        timeout_s: float,
        credentials: Credentials,
        root: str = "",
        on_connect: OnConnect = lambda _endpoint, _version: None,
    ) -> None:
        if not endpoints:
            raise ValueError("endpoints is empty: give at least one (host, port)")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}: give a time above 0")
        # each once: "the next one" is behind the first of its name
        self._endpoints = list(dict.fromkeys((host.strip("[]"), port) for host, port in endpoints))
        self._timeout_s = timeout_s
        self._credentials, self._root, self._on_connect = credentials, root, on_connect
        self._state = threading.Lock()  # held briefly; guards the next three
        self._current: Connection | None = None
        self._preferred = 0
        self._closed = False
        self._connecting = threading.Lock()  # held while one thread connects for all

    @property
    def endpoints(self) -> list[str]:
        """The endpoints as "host:port"."""
        return [host_port(host, port) for host, port in self._endpoints]

    def call(self, operation: Callable[[Connection, float], T], *, repeatable: bool = True) -> T:
        """Run `operation(connection, timeout_s)`, on another endpoint if the first does not serve.

        Args:
            operation: One call of a generated stub; it may raise grpc.RpcError.
            repeatable: Whether doing it twice is the same as once. What is not repeatable is tried again only if it
                certainly did not reach etcd.

        Raises:
            StoreUnavailableError: no endpoint served within the time; names each and why.
            StoreError: etcd's answer, see `to_store_error`.
        """
        count = len(self._endpoints)
        retrying = tenacity.Retrying(
            # each endpoint once, and the first again: it may have been only its connection that was dead
            stop=tenacity.stop_after_attempt(count + 1) | tenacity.stop_after_delay(self._timeout_s),
            wait=tenacity.wait_chain(*[tenacity.wait_none()] * (count - 1), tenacity.wait_random(0.05, 0.2)),
            retry=tenacity.retry_if_exception_type(_TryNext),
            reraise=True,
        )
        attempt = _Attempt(self, time.monotonic() + self._timeout_s, repeatable)
        try:
            result: T = retrying(attempt.run, operation)
            return result
        except _TryNext as last:
            raise last.if_last from last.__cause__

    def connection(self, attempt: _Attempt) -> Connection:
        """The current connection, or a new one to the preferred endpoint."""
        with self._state:
            self._check_open()
            if self._current is not None:
                return self._current
        if not self._connecting.acquire(timeout=attempt.remaining_s()):
            raise _TryNext(StoreUnavailableError(f"still connecting to etcd at {', '.join(self.endpoints)}"))
        try:
            with self._state:
                if self._current is not None:
                    return self._current
                index = self._preferred
            connection = self._connect(index, attempt)
            with self._state:
                if self._closed:  # while we were connecting
                    connection.client.close()
                self._check_open()
                self._current = connection
            logger.info("connected to etcd at %s", connection.endpoint)
            self._on_connect(connection.endpoint, connection.version)
            return connection
        finally:
            self._connecting.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("this EtcdStore is closed")

    def _connect(self, index: int, attempt: _Attempt) -> Connection:
        host, port = self._endpoints[index]
        endpoint = host_port(host, port)
        client = self._client(host, port)
        try:
            timeout_s = attempt.share_s()
            self._authenticate(client, timeout_s)
            status = client.maintenancestub.Status(etcdrpc.StatusRequest(), timeout_s, metadata=client.metadata)
            if not status.leader:
                self._prefer_after(index)
                raise attempt.try_next(endpoint, StoreUnavailableError(f"etcd at {endpoint}: no leader"))
            self._check_permission(client, timeout_s)
        except grpc.RpcError as error:
            client.close()
            fault = self.to_store_error(error, endpoint)
            if not isinstance(fault, StoreUnavailableError):
                raise fault from error
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                because = why_no_handshake(host, port, self._credentials, min(1.0, attempt.share_s()))
                fault = fault if because is None else StoreAccessError(because)
            self._prefer_after(index)
            raise attempt.try_next(endpoint, fault) from error
        except BaseException:
            client.close()
            raise
        return Connection(client, endpoint, status.version)

    def _client(self, host: str, port: int) -> etcd3.Etcd3Client:
        """A client that has not connected yet. The files are read each time: certificates are renewed in a long run."""
        credentials = self._credentials
        try:
            return etcd3.client(
                f"[{host}]" if ":" in host else host,  # it puts a colon and the port behind it
                port,
                ca_cert=credentials.ca_cert,
                cert_cert=credentials.cert_cert,
                cert_key=credentials.cert_key,
                grpc_options=_CHANNEL_OPTIONS,
            )
        except OSError as error:
            raise StoreAccessError(f"cannot read the certificate file {error.filename}: {error.strerror}") from error

    def to_store_error(self, error: grpc.RpcError, endpoint: str) -> StoreError:
        """See `etcd_wire.to_store_error`; with who we are and what we may need."""
        return to_store_error(error, endpoint, self._credentials.who, self._root)

    def _authenticate(self, client: etcd3.Etcd3Client, timeout_s: float) -> None:
        """Log in. Not by etcd3's own arguments: it also sets call credentials, which gRPC refuses without TLS."""
        user, password = self._credentials.user, self._credentials.password
        if user is None or password is None:
            return
        request = etcdrpc.AuthenticateRequest(name=user, password=password)
        try:
            token = etcdrpc.AuthStub(client.channel).Authenticate(request, timeout_s).token
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return  # as etcd's own clients: an open etcd needs no login
            raise
        client.metadata = (("token", token),)

    def _check_permission(self, client: etcd3.Etcd3Client, timeout_s: float) -> None:
        """Have etcd refuse now what it would refuse later: of a transaction it checks all permissions first of all.

        A role that may read but not write would come through the start, and the run would wait for its first group.
        """
        credentials = self._credentials
        if not self._root or (credentials.user is None and credentials.cert_cert is None):
            return
        key = f"{self._root}/may-i"  # never written: no key has a version below 0
        request = etcdrpc.TxnRequest(
            compare=[to_compare(Compare(key, Target.VERSION, -1))], success=[to_operation(Put(key, b""))]
        )
        client.kvstub.Txn(request, timeout_s, metadata=client.metadata)

    def _prefer_after(self, index: int) -> None:
        with self._state:
            self._preferred = (index + 1) % len(self._endpoints)

    def close_failed(self, connection: Connection, *, same_endpoint: bool = False) -> None:
        """Close a connection that does not serve; its other calls and its watches fail with it, as they should."""
        with self._state:
            if self._current is connection:
                self._current = None
                if not same_endpoint:
                    index = self.endpoints.index(connection.endpoint)
                    self._preferred = (index + 1) % len(self._endpoints)
        connection.client.close()

    def close(self) -> None:
        """Give up the connection; every further call raises StoreUnavailableError. Idempotent."""
        with self._state:
            self._closed = True
            current, self._current = self._current, None
        if current is not None:
            current.client.close()


class _Attempt:
    """One call on its way through the endpoints: the time it has left and what it met so far."""

    def __init__(self, failover: Failover, deadline_s: float, repeatable: bool) -> None:
        self._failover = failover
        self._deadline_s = deadline_s
        self._repeatable = repeatable
        self._met: dict[str, StoreError] = {}

    def remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def share_s(self) -> float:
        """A silent endpoint may use up only its share, so that the ones behind it get their turn."""
        return self.remaining_s() / max(1, len(self._failover.endpoints) - len(self._met))

    def try_next(self, endpoint: str, fault: StoreError) -> _TryNext:
        """The signal for another attempt; an endpoint that refuses us must not hide that another one is only away."""
        self._met[endpoint] = fault
        if isinstance(fault, (StoreUnavailableError, StoreAccessError)):
            met = self._met.values()
            refused = all(isinstance(one, StoreAccessError) for one in met)
            texts = "; ".join(str(one) for one in met)
            fault = StoreAccessError(texts) if refused else StoreUnavailableError(f"no etcd endpoint serves: {texts}")
        return _TryNext(fault)

    def run(self, operation: Callable[[Connection, float], T]) -> T:
        connection = self._failover.connection(self)
        try:
            return operation(connection, self.share_s() if self._repeatable else self.remaining_s())
        except grpc.RpcError as error:
            fault = self._failover.to_store_error(error, connection.endpoint)
            if is_stale_login(error):
                self._failover.close_failed(connection, same_endpoint=True)
                raise self.try_next(connection.endpoint, fault) from error
            if not isinstance(fault, StoreUnavailableError):
                raise fault from error
            self._failover.close_failed(connection)
            if self._repeatable or was_not_sent(error):
                raise self.try_next(connection.endpoint, fault) from error
            raise StoreUnavailableError(f"{fault}; the write may or may not have been done") from error
        except ValueError as error:
            if "cannot invoke rpc" not in str(error).lower():  # "on closed channel!" or ": Channel closed!"
                raise
            # the channel was closed under us, mostly by another thread that retired the connection: nothing was sent
            self._failover.close_failed(connection, same_endpoint=True)
            lost = StoreUnavailableError(f"etcd at {connection.endpoint}: connection lost")
            raise self.try_next(connection.endpoint, lost) from error
