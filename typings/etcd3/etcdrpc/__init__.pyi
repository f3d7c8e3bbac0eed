# The messages and stubs of etcd's API (api/etcdserverpb/rpc.proto) that torchelastic uses, as etcd3 0.12 generated them.
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

_Metadata = Sequence[tuple[str, str]] | None

class ResponseHeader:
    cluster_id: int
    member_id: int
    revision: int

class KeyValue:
    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int

class Event:
    PUT: int
    DELETE: int
    type: int
    kv: KeyValue

class RangeRequest:
    def __init__(self, *, key: bytes, range_end: bytes = ...) -> None: ...

class RangeResponse:
    header: ResponseHeader
    kvs: Sequence[KeyValue]

class PutRequest:
    def __init__(self, *, key: bytes, value: bytes, lease: int = ...) -> None: ...

class DeleteRangeRequest:
    def __init__(self, *, key: bytes) -> None: ...

class RequestOp:
    def __init__(self, *, request_put: PutRequest = ..., request_delete_range: DeleteRangeRequest = ...) -> None: ...

class Compare:
    EQUAL: int
    VERSION: int
    CREATE: int
    VALUE: int
    MOD: int
    def __init__(
        self,
        *,
        result: int,
        target: int,
        key: bytes,
        version: int = ...,
        create_revision: int = ...,
        mod_revision: int = ...,
        value: bytes = ...,
    ) -> None: ...

class TxnRequest:
    def __init__(self, *, compare: Sequence[Compare] = ..., success: Sequence[RequestOp] = ...) -> None: ...

class TxnResponse:
    header: ResponseHeader
    succeeded: bool

class CompactionRequest:
    def __init__(self, *, revision: int) -> None: ...

class LeaseGrantRequest:
    def __init__(self, *, TTL: int) -> None: ...

class LeaseGrantResponse:
    ID: int
    TTL: int

class LeaseRevokeRequest:
    def __init__(self, *, ID: int) -> None: ...

class LeaseKeepAliveRequest:
    def __init__(self, *, ID: int) -> None: ...

class LeaseKeepAliveResponse:
    ID: int
    TTL: int

class WatchCreateRequest:
    def __init__(self, *, key: bytes, range_end: bytes = ..., start_revision: int = ...) -> None: ...

class WatchRequest:
    def __init__(self, *, create_request: WatchCreateRequest) -> None: ...

class WatchResponse:
    canceled: bool
    cancel_reason: str
    compact_revision: int
    events: Sequence[Event]

class AuthenticateRequest:
    def __init__(self, *, name: str, password: str) -> None: ...

class AuthenticateResponse:
    token: str

class StatusRequest: ...

class StatusResponse:
    header: ResponseHeader
    version: str
    dbSize: int
    leader: int

class AlarmRequest:
    GET: int
    def __init__(self, *, action: int) -> None: ...

class AlarmMember:
    memberID: int
    alarm: int

class AlarmResponse:
    alarms: Sequence[AlarmMember]

class Call(Protocol):
    def cancel(self) -> object: ...

class WatchCall(Call, Protocol):
    def __iter__(self) -> Iterator[WatchResponse]: ...

class KeepAliveCall(Call, Protocol):
    def __iter__(self) -> Iterator[LeaseKeepAliveResponse]: ...

class KVStub:
    def Range(self, request: RangeRequest, timeout: float, *, metadata: _Metadata = ...) -> RangeResponse: ...
    def Txn(self, request: TxnRequest, timeout: float, *, metadata: _Metadata = ...) -> TxnResponse: ...
    def Compact(self, request: CompactionRequest, timeout: float, *, metadata: _Metadata = ...) -> object: ...

class LeaseStub:
    def LeaseGrant(
        self, request: LeaseGrantRequest, timeout: float, *, metadata: _Metadata = ...
    ) -> LeaseGrantResponse: ...
    def LeaseRevoke(self, request: LeaseRevokeRequest, timeout: float, *, metadata: _Metadata = ...) -> object: ...
    def LeaseKeepAlive(
        self, requests: Iterable[LeaseKeepAliveRequest], timeout: float, *, metadata: _Metadata = ...
    ) -> KeepAliveCall: ...

class WatchStub:
    def __init__(self, channel: Any) -> None: ...
    def Watch(self, requests: Iterable[WatchRequest], *, metadata: _Metadata = ...) -> WatchCall: ...

class MaintenanceStub:
    def Status(self, request: StatusRequest, timeout: float, *, metadata: _Metadata = ...) -> StatusResponse: ...
    def Alarm(self, request: AlarmRequest, timeout: float, *, metadata: _Metadata = ...) -> AlarmResponse: ...

class AuthStub:
    def __init__(self, channel: Any) -> None: ...
    def Authenticate(self, request: AuthenticateRequest, timeout: float) -> AuthenticateResponse: ...
