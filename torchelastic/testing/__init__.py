"""What tests of elastic code need: a clock that obeys, stores that fail on command, a real etcd."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.rendezvous.memory import MemoryStore
    from torchelastic.testing.clock import FakeClock
    from torchelastic.testing.etcd import python_protobuf_env, running_etcd

_MODULE_OF = {
    "FakeClock": "torchelastic.testing.clock",
    "MemoryStore": "torchelastic.rendezvous.memory",
    "python_protobuf_env": "torchelastic.testing.etcd",
    "running_etcd": "torchelastic.testing.etcd",
}

__all__ = ["FakeClock", "MemoryStore", "python_protobuf_env", "running_etcd"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
