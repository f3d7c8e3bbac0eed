"""What concerns processes of one host: children that do not outlive their parent, signals, a common clock."""

from __future__ import annotations

from torchelastic.processes.identity import boot_time_s
from torchelastic.processes.lifeline import dies_with_parent, signal_main_thread

__all__ = ["boot_time_s", "dies_with_parent", "signal_main_thread"]
