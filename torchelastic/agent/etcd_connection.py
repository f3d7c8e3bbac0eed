"""Opens the agent's connection to etcd: the one place where grpc and protobuf come into a process of ours."""

from __future__ import annotations

import os

from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.url import RendezvousUrl


def connect(url: RendezvousUrl) -> CoordinationStore:
    """A store on the etcd of `url`; does not connect yet.

    etcd3's generated code does not import beside protobuf >= 4 unless protobuf's slow, pure implementation is chosen
    before its first import; that choice holds for this process only and is not passed on to workers.
    """
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    from torchelastic.rendezvous.etcd import EtcdStore

    return EtcdStore(url.endpoints)
