"""Asks an etcd what `etcd_rules` wants to know. Every call has a time limit; what is written goes with a lease."""

from __future__ import annotations

import re
import secrets
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from torchelastic.agent.etcd_opening import connect
from torchelastic.doctor.etcd_rules import EndpointFacts, EtcdFacts, judge_etcd
from torchelastic.doctor.findings import Finding, Level
from torchelastic.processes.background import side_by_side
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.store import CoordinationStore, Put, StoreAccessError, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.text import host_port

if TYPE_CHECKING:
    from torchelastic.rendezvous.etcd_connection import Connection

#: The longest that one endpoint may take to answer.
ANSWER_S = 3.0
#: So many writes are timed; fewer if they take longer than this together.
COMMITS, COMMITS_S = 5, 2.0
#: What is written goes with this lease if this process is killed.
LEASE_S = 15.0
_QUOTA = re.compile(rb"^etcd_server_quota_backend_bytes ([0-9.e+]+)$", re.M)
_MOST_METRICS_BYTES = 4 * 2**20
#: Credentials, or why there are none.
CredentialsOrReason = Credentials | str
_ALARMS = {1: "NOSPACE", 2: "CORRUPT"}  # AlarmType of etcd's rpc.proto


_opening = threading.Lock()


def open_store(url: RendezvousUrl, credentials: Credentials) -> CoordinationStore:
    """A store on that etcd; does not connect yet. From any thread: `connect` changes the environment for a moment."""
    with _opening:
        return connect(url, credentials)


def gather_etcd(url: RendezvousUrl, credentials: Credentials) -> EtcdFacts:
    """Ask each endpoint by itself, then write to the cluster. Takes some seconds at most.

    Args:
        url: with the endpoints, and the run below whose key is written.
        credentials: certificates and user.
    """
    open_store(url, credentials).close()  # makes gRPC and protobuf ready for import, in the one way that works
    asks = {str(index): partial(_ask, url, credentials, index) for index in range(len(url.endpoints))}
    ended = side_by_side(asks, dict.fromkeys(asks, ANSWER_S + 2.0))
    endpoints, alarms, asks_for_login = [], [], None
    for index, (host, port) in enumerate(url.endpoints):
        answer = ended.get(str(index))
        error = None if answer is None else answer.exception()
        if answer is None or error is not None:
            why = "no answer, not even to the question where that is" if answer is None else str(error)
            endpoints.append(EndpointFacts(f"{host}:{port}", why, isinstance(error, StoreAccessError)))
            continue
        endpoint, raised, asks_for_login = answer.result()
        endpoints.append(endpoint)
        alarms.append(raised)
    known = [names for names in alarms if names is not None]
    commits_s: tuple[float, ...] = ()
    failure = ""
    if any(not endpoint.failure for endpoint in endpoints):
        commits_s, failure = _commits(url, credentials, time.monotonic)
    return EtcdFacts(
        tuple(endpoints),
        tuple(sorted({name for names in known for name in names})) if known else None,
        commits_s,
        failure,
        is_encrypted=credentials.ca_cert is not None,
        user=credentials.user,
        has_certificate=credentials.cert_cert is not None,
        asks_for_login=asks_for_login,
        is_here=url.is_on_this_host,
    )


_Answer = tuple[EndpointFacts, "tuple[str, ...] | None", "bool | None"]


def _ask(url: RendezvousUrl, credentials: Credentials, index: int) -> _Answer:
    from torchelastic.rendezvous.etcd_connection import Failover
    from torchelastic.rendezvous.etcd_wire import etcdrpc

    host, port = url.endpoints[index]
    failover = Failover([(host, port)], ANSWER_S, credentials, url.root)
    try:

        def status(connection: Connection, timeout_s: float) -> etcdrpc.StatusResponse:
            client = connection.client
            return client.maintenancestub.Status(etcdrpc.StatusRequest(), timeout_s, metadata=client.metadata)

        def alarms(connection: Connection, timeout_s: float) -> etcdrpc.AlarmResponse:
            client, request = connection.client, etcdrpc.AlarmRequest(action=etcdrpc.AlarmRequest.GET)
            return client.maintenancestub.Alarm(request, timeout_s, metadata=client.metadata)

        answer = failover.call(status)
        raised: tuple[str, ...] | None
        try:
            found = failover.call(alarms).alarms
            raised = tuple(_ALARMS.get(one.alarm, f"number {one.alarm}") for one in found if one.alarm)
        except StoreError:
            raised = None
        facts = EndpointFacts(
            f"{host}:{port}",
            version=answer.version,
            cluster_id=answer.header.cluster_id,
            leader_id=answer.leader,
            db_bytes=answer.dbSize,
            quota_bytes=_quota(host, port, credentials),
        )
        return facts, raised, failover.call(_asks_for_login)
    finally:
        failover.close()


def _asks_for_login(connection: Connection, timeout_s: float) -> bool | None:
    """Whether somebody without a login may not read; no value is read."""
    from torchelastic.rendezvous.etcd_wire import etcdrpc, grpc

    try:
        connection.client.kvstub.Range(etcdrpc.RangeRequest(key=b"/torchelastic-doctor"), timeout_s)
    except grpc.RpcError as error:
        refused = error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
        return True if refused else None
    return False


def _quota(host: str, port: int, credentials: Credentials) -> int | None:
    """From etcd's own metrics, which it serves at the same port; None where it does not."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # never by way of a web proxy
    try:
        if credentials.ca_cert is not None:
            context = ssl.create_default_context(cafile=credentials.ca_cert)
            if credentials.cert_cert is not None:
                context.load_cert_chain(credentials.cert_cert, credentials.cert_key)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        scheme = "http" if credentials.ca_cert is None else "https"
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"{scheme}://{host_port(host, port)}/metrics", timeout=1.0) as response:
            match = _QUOTA.search(response.read(_MOST_METRICS_BYTES))
            return int(float(match.group(1))) if match else None
    except (OSError, ValueError):
        return None


def _commits(url: RendezvousUrl, credentials: Credentials, clock: Callable[[], float]) -> tuple[tuple[float, ...], str]:
    """How long some writes took, and why one failed."""
    took_s: list[float] = []
    key = f"{doctor_root(url)}/commits/{secrets.token_hex(8)}"
    with ExitStack() as stack:
        store = open_store(url, credentials)
        stack.callback(store.close)
        try:
            lease = store.grant_lease(LEASE_S)
            stack.callback(_end_lease, store, lease.lease_id)
            for number in range(COMMITS):
                began_s = clock()
                store.txn((), (Put(key, str(number).encode(), lease.lease_id),))
                took_s.append(clock() - began_s)
                if sum(took_s) > COMMITS_S:
                    break
        except StoreError as error:
            return tuple(took_s), str(error)
    return tuple(took_s), ""


def doctor_root(url: RendezvousUrl) -> str:
    """The key below which a doctor writes; no agent of a run looks there."""
    return f"{url.root}/doctor"


def _end_lease(store: CoordinationStore, lease_id: int) -> None:
    try:
        store.revoke_lease(lease_id)
    except StoreError:
        pass  # it ends by itself


def check(url: RendezvousUrl, credentials: CredentialsOrReason) -> Sequence[Finding]:
    """Check an etcd.

    Args:
        url: where it is.
        credentials: how to reach it; a text: why there are none.
    """
    if isinstance(credentials, str):
        remedy = "see docs/security.md for the files, variables and options"
        return [Finding("etcd", Level.ERROR, "certificates or login cannot be used", credentials, remedy)]
    return judge_etcd(gather_etcd(url, credentials))
