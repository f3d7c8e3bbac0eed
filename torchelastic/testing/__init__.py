"""What tests of elastic code need: a clock that obeys, a disk that fails on command, a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.testing.clock import FakeClock as FakeClock
    from torchelastic.testing.disk_faults import (
        FaultyDisk as FaultyDisk,
        fail_at as fail_at,
        full_at as full_at,
        kill_at as kill_at,
        pause_at as pause_at,
        short_write_at as short_write_at,
    )
    from torchelastic.testing.etcd import python_protobuf_env as python_protobuf_env, running_etcd as running_etcd

_NAMES = {
    "clock": "FakeClock",
    "disk_faults": "FaultyDisk fail_at full_at kill_at pause_at short_write_at",
    "etcd": "python_protobuf_env running_etcd",
}

lazily(__name__, _NAMES)
