# etcd3 0.12 ships no types: what torchelastic uses of it.
from collections.abc import Sequence
from typing import Any

from etcd3 import etcdrpc as etcdrpc

class Etcd3Client:
    channel: Any  # grpc.Channel; grpc ships no types
    metadata: Sequence[tuple[str, str]] | None
    kvstub: etcdrpc.KVStub
    leasestub: etcdrpc.LeaseStub
    maintenancestub: etcdrpc.MaintenanceStub
    def compact(self, revision: int) -> None: ...
    def close(self) -> None: ...

def client(
    host: str = ...,
    port: int = ...,
    ca_cert: str | None = ...,
    cert_key: str | None = ...,
    cert_cert: str | None = ...,
    timeout: float | None = ...,
    user: str | None = ...,
    password: str | None = ...,
    grpc_options: Sequence[tuple[str, int | str]] | None = ...,
) -> Etcd3Client: ...
