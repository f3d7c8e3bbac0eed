"""What tests of elastic code need: a clock that obeys, a disk that fails on command, a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.testing.clock import FakeClock as FakeClock
    from torchelastic.testing.disk_faults import FaultyDisk as FaultyDisk
    from torchelastic.testing.disk_faults import fail_at as fail_at
    from torchelastic.testing.disk_faults import full_at as full_at
    from torchelastic.testing.disk_faults import kill_at as kill_at
    from torchelastic.testing.disk_faults import pause_at as pause_at
    from torchelastic.testing.disk_faults import short_write_at as short_write_at
    from torchelastic.testing.etcd import python_protobuf_env as python_protobuf_env
    from torchelastic.testing.etcd import running_etcd as running_etcd

__getattr__, __dir__ = lazily(__name__)
