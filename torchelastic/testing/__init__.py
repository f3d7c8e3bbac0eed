"""What tests of elastic code need: a clock that obeys, stores and disks that fail on command, a real etcd."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.rendezvous.memory import MemoryStore
    from torchelastic.testing.clock import FakeClock
    from torchelastic.testing.disk_faults import FaultyDisk, fail_at, full_at, kill_at, pause_at, short_write_at
    from torchelastic.testing.etcd import python_protobuf_env, running_etcd

_MODULE_OF = {
    "FakeClock": "torchelastic.testing.clock",
    "FaultyDisk": "torchelastic.testing.disk_faults",
    "MemoryStore": "torchelastic.rendezvous.memory",
    "fail_at": "torchelastic.testing.disk_faults",
    "full_at": "torchelastic.testing.disk_faults",
    "kill_at": "torchelastic.testing.disk_faults",
    "pause_at": "torchelastic.testing.disk_faults",
    "python_protobuf_env": "torchelastic.testing.etcd",
    "running_etcd": "torchelastic.testing.etcd",
    "short_write_at": "torchelastic.testing.disk_faults",
}

__all__ = [
    "FakeClock",
    "FaultyDisk",
    "MemoryStore",
    "fail_at",
    "full_at",
    "kill_at",
    "pause_at",
    "python_protobuf_env",
    "running_etcd",
    "short_write_at",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
