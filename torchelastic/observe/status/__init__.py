"""What a run looks like from outside: the status that agents write into etcd, and what is made of it.

Names are loaded on first use (PEP 562); importing this package imports no torch. See docs/observing.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.observe.status.run_status import EventLine as EventLine
    from torchelastic.observe.status.run_status import HostStatus as HostStatus
    from torchelastic.observe.status.run_status import RunStatus as RunStatus
    from torchelastic.observe.status.run_status import WorkerStatus as WorkerStatus
    from torchelastic.observe.status.status_reader import StatusReader as StatusReader

__getattr__, __dir__ = lazily(__name__)
