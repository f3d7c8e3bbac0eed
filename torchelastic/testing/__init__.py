"""What tests of elastic code need: a clock that obeys, a disk that fails on command, a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.testing.clock import FakeClock
    from torchelastic.testing.disk_faults import FaultyDisk, fail_at, full_at, kill_at, pause_at, short_write_at
    from torchelastic.testing.etcd import python_protobuf_env, running_etcd

_MODULE_OF = {
    "FakeClock": "torchelastic.testing.clock",
    "FaultyDisk": "torchelastic.testing.disk_faults",
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
    "fail_at",
    "full_at",
    "kill_at",
    "pause_at",
    "python_protobuf_env",
    "running_etcd",
    "short_write_at",
]

__getattr__, __dir__ = lazily(__name__, _MODULE_OF)
