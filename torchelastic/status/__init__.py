"""What a run looks like from outside: the status that agents write into etcd, and what is made of it.

Names are loaded on first use (PEP 562); importing this package imports no torch. See docs/observing.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.status.reading import StatusReader
    from torchelastic.status.run_status import EventLine, HostStatus, RunStatus, WorkerStatus

__all__ = [
    "EventLine",
    "HostStatus",
    "RunStatus",
    "StatusReader",
    "WorkerStatus",
]

_MODULES = {
    "reading": ("StatusReader",),
    "run_status": ("EventLine", "HostStatus", "RunStatus", "WorkerStatus"),
}

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
