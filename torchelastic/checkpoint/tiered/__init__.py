"""Checkpoints in several tiers, saved by all ranks beside the training; see `manager.TieredCheckpointManager`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.tiered.api import ElasticCheckpointManager, ElasticState
    from torchelastic.checkpoint.tiered.manager import TieredCheckpointManager
    from torchelastic.group.peers import Alone, Peers

__all__ = [
    "Alone",
    "ElasticCheckpointManager",
    "ElasticState",
    "Peers",
    "TieredCheckpointManager",
]

_HOME_OF_NAME = {
    "Alone": "torchelastic.group.peers",
    "ElasticCheckpointManager": "api",
    "ElasticState": "api",
    "Peers": "torchelastic.group.peers",
    "TieredCheckpointManager": "manager",
}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
