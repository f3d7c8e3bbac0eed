"""Where checkpoints lie, freshest first: this host's memory, a disk, durable storage; and which one to restore.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.tiers.api import SealedShard, Tier, TierContext, TierEntry, agree_epoch
    from torchelastic.checkpoint.tiers.disk import DiskTier
    from torchelastic.checkpoint.tiers.durable import DurableTier
    from torchelastic.checkpoint.tiers.memory import MemoryTier
    from torchelastic.checkpoint.tiers.selection import Candidate, Inventory, Read, candidates

__all__ = [
    "Candidate",
    "DiskTier",
    "DurableTier",
    "Inventory",
    "MemoryTier",
    "Read",
    "SealedShard",
    "Tier",
    "TierContext",
    "TierEntry",
    "agree_epoch",
    "candidates",
]

_NAMES_OF_HOME = {
    "api": ("SealedShard", "Tier", "TierContext", "TierEntry", "agree_epoch"),
    "disk": ("DiskTier",),
    "durable": ("DurableTier",),
    "memory": ("MemoryTier",),
    "selection": ("Candidate", "Inventory", "Read", "candidates"),
}
_HOME_OF_NAME = {name: f"{__name__}.{home}" for home, names in _NAMES_OF_HOME.items() for name in names}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
