"""What concerns processes of one host: children that do not outlive their parent, signals, a common clock."""

from __future__ import annotations

from torchelastic.processes.clock import boot_time_s
from torchelastic.processes.lifeline import dies_with_parent
from torchelastic.processes.main_thread import signal_main_thread

__all__ = ["boot_time_s", "dies_with_parent", "signal_main_thread"]
