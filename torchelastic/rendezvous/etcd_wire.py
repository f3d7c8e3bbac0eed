"""etcd's messages and error codes in this package's words. Also the one place that imports etcd3."""

from __future__ import annotations

from typing import Any

import grpc as grpc

from torchelastic.rendezvous.store import (
    CompactedError,
    Compare,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreAccessError,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    Target,
)

try:
    import etcd3 as etcd3
    from etcd3 import etcdrpc as etcdrpc
except TypeError as error:  # what protobuf >= 4 raises for code that an older protoc generated
    raise ImportError(
        "etcd3's generated code runs only on protobuf's Python implementation, but this process uses another: set "
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the environment before anything imports protobuf "
        "(torchelastic.rendezvous.etcd is meant for the agent process, not for trainers)"
    ) from error


def to_bytes(key: str) -> bytes:
    """A key as etcd has it."""
    return key.encode("utf-8", "surrogateescape")


def to_str(key: bytes) -> str:
    """A key as we have it; one that is not UTF-8 (somebody else's) survives the way back through `to_bytes`."""
    return key.decode("utf-8", "surrogateescape")


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """`key` and `range_end` that etcd understands as "all keys that start with `prefix`" (learning/api, "Range")."""
    key = to_bytes(prefix)
    stem = key.rstrip(b"\xff")
    if not stem:
        return key or b"\0", b"\0"  # range_end \0: all keys from `key` on
    return key, stem[:-1] + bytes([stem[-1] + 1])


def to_key_value(kv: etcdrpc.KeyValue) -> KeyValue:
    """One key of an answer."""
    return KeyValue(to_str(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def to_event(event: etcdrpc.Event) -> StoreEvent:
    """One change of a watch's answer."""
    kind = EventKind.DELETE if event.type == 1 else EventKind.PUT  # mvccpb.Event.EventType
    return StoreEvent(kind, to_key_value(event.kv))


_COMPARED = {
    Target.CREATE_REVISION: (etcdrpc.Compare.CREATE, "create_revision"),
    Target.MOD_REVISION: (etcdrpc.Compare.MOD, "mod_revision"),
    Target.VERSION: (etcdrpc.Compare.VERSION, "version"),
    Target.VALUE: (etcdrpc.Compare.VALUE, "value"),
}


def to_compare(compare: Compare) -> etcdrpc.Compare:
    """One condition of a transaction."""
    target, field = _COMPARED[compare.target]
    expected: dict[str, Any] = {field: compare.value}
    return etcdrpc.Compare(result=etcdrpc.Compare.EQUAL, target=target, key=to_bytes(compare.key), **expected)


def to_operation(write: Put | Delete) -> etcdrpc.RequestOp:
    """One write of a transaction."""
    key = to_bytes(write.key)
    if isinstance(write, Put):
        return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=write.value, lease=write.lease_id))
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


_ACCESS = ("auth", "user name", "password", "permission")  # words of etcd's refusals (api/v3rpc/rpctypes/error.go)


def to_store_error(error: grpc.RpcError, endpoint: str, who: str = "this user", root: str = "") -> StoreError:
    """What an error of a call means for the caller; codes and texts are those of etcd's api/v3rpc/rpctypes/error.go.

    Args:
        error: The call's end.
        endpoint: Where it went.
        who: As whom; see `Credentials.who`.
        root: The key under which the caller's keys are, for the remedy of a missing permission.
    """
    code, details = error.code(), error.details() or "no details"
    text = f"etcd at {endpoint}: {details}"
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseLostError(text)
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return CompactedError(text)
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return StoreAccessError(text + _remedy(details, who, root))
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        refused = any(word in details.lower() for word in _ACCESS)
        return StoreAccessError(text + _remedy(details, who, root)) if refused else StoreError(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return StoreUnavailableError(f"etcd at {endpoint}: no answer in time")
    return StoreUnavailableError(text)


def _remedy(details: str, who: str, root: str) -> str:
    """What to do about a refusal; empty where etcd's text says it all."""
    if "permission denied" in details:
        key = f"{root or '/torchelastic/RUN_ID'}/"
        return f": {who} needs a role with `etcdctl role grant-permission ROLE readwrite --prefix=true {key}`"
    if "invalid user ID or password" in details:
        return f": {who} is unknown there or has another password: check both (`etcdctl user passwd` sets a new one)"
    if "user name is empty" in details:
        return ": it wants a login: give user and password_file (--etcd-user, --etcd-password-file)"
    return ""


def is_stale_login(error: grpc.RpcError) -> bool:
    """Whether etcd refused the token and not the user: tokens expire, and a restart forgets them. Nothing was done."""
    details = error.details() or ""
    return "invalid auth token" in details or "revision of auth store is old" in details


def was_not_sent(error: grpc.RpcError) -> bool:
    """Whether the request certainly did not reach etcd (gRPC had no connection), so that repeating it is safe."""
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return unavailable and "failed to connect to all addresses" in (error.details() or "")
