"""What tests of elastic code need: a clock that obeys, a disk or a core that fails on command, a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.testing.clock import FakeClock as FakeClock
    from torchelastic.testing.compute_faults import BitFlip as BitFlip
    from torchelastic.testing.compute_faults import flip_bit as flip_bit
    from torchelastic.testing.disk_faults import FaultyDisk as FaultyDisk
    from torchelastic.testing.disk_faults import fail_at as fail_at
    from torchelastic.testing.disk_faults import full_at as full_at
    from torchelastic.testing.disk_faults import kill_at as kill_at
    from torchelastic.testing.disk_faults import pause_at as pause_at
    from torchelastic.testing.disk_faults import short_write_at as short_write_at
    from torchelastic.testing.etcd import python_protobuf_env as python_protobuf_env
    from torchelastic.testing.etcd import running_etcd as running_etcd
    from torchelastic.testing.file_system_faults import FileSystemFault as FileSystemFault
    from torchelastic.testing.file_system_faults import busy_unlink as busy_unlink
    from torchelastic.testing.file_system_faults import file_system_without as file_system_without
    from torchelastic.testing.file_system_faults import no_folder_fsync as no_folder_fsync
    from torchelastic.testing.file_system_faults import no_folder_rename as no_folder_rename
    from torchelastic.testing.file_system_faults import no_free_space as no_free_space
    from torchelastic.testing.file_system_faults import no_fsync as no_fsync
    from torchelastic.testing.file_system_faults import no_links as no_links
    from torchelastic.testing.file_system_faults import no_locks as no_locks
    from torchelastic.testing.file_system_faults import no_rename_of_open_files as no_rename_of_open_files
    from torchelastic.testing.file_system_faults import no_rename_over as no_rename_over

__getattr__, __dir__ = lazily(__name__)
