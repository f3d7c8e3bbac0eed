"""Starting processes that do not outlive the one that wanted them."""

from __future__ import annotations

from torchelastic.processes.lifeline import dies_with_parent

__all__ = ["dies_with_parent"]
