"""Checkpoints in several tiers, saved by all ranks beside the training; see `manager.TieredCheckpointManager`.

After the same committed step each rank copies its share into a slot of warm memory; that alone stops the training.
One thread per process does the rest: checksums, then for each tier that takes part (rank 0 says which) put, replicas,
and a note to rank 0, in the store of the round. When rank 0 has the notes of all, it commits. A rank that could not
store says why, and nobody publishes; one that is silent is waited for, named, and the save is given up. After the
first save no file is created and no memory allocated on the training thread. Names are loaded on first use (PEP 562).
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
