"""Durable checkpoints: what is saved where, and how it is found again.

Below it: `policy` (when to save, what to keep), `shards` (one file format, read by any number of ranks), `store`
(what makes a checkpoint, and the places for it), `replication` (copies on other hosts). On these stand the kinds of
checkpoints: `tiered`, `training_state` (velastic's names), `memory` (for DCP, with ML Flashpoint's names), `local`
and `async_ckpt` (NVRx's names); and `command`. For all of them `restore_plan.py` decides which checkpoint is
restored, and who gets which shard from whom.

`FileSystemCheckpointManager`, in this package itself, has torchelastic 0.1's names. It knows no ranks and calls no
collective: the train loop calls `save` on the one rank that saves, and `load_latest` on the one that restores. Files
are written and fsynced in a hidden folder, which one rename publishes; ids only grow, and nothing is overwritten. A
stream is opened after its size and SHA-256 were compared; what `state.load` raises on intact bytes propagates
unchanged. A hidden folder is removed when its writer is a dead process of this host, or nothing in it has changed for
a day. Of a folder of 0.1, which has no manifest, the file `default` has to be one that
`torch.load(weights_only=True)` can read.

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.api import (
        Checkpoint,
        CheckpointManager,
        get_checkpoint_manager,
        set_checkpoint_manager,
    )
    from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
    from torchelastic.checkpoint.file_system import FileSystemCheckpointManager
    from torchelastic.checkpoint.policy.keeping import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepEverySeconds,
        KeepLast,
        KeepPolicy,
    )
    from torchelastic.checkpoint.policy.saving import SaveDecision, SaveMoment, SavePolicy
    from torchelastic.checkpoint.policy.schedules import AtSteps, EverySeconds, EverySteps, Never, OnSignal
    from torchelastic.checkpoint.policy.young_daly import YoungDaly
    from torchelastic.checkpoint.store.disk import DiskTier
    from torchelastic.checkpoint.store.durable import DurableTier
    from torchelastic.checkpoint.store.memory import MemoryTier
    from torchelastic.checkpoint.tiered.manager import TieredCheckpointManager
    from torchelastic.checkpoint.training_state.state import BCPState, DCPState

__all__ = [
    "AtSteps",
    "BCPState",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CorruptCheckpointError",
    "DCPState",
    "DiskTier",
    "DurableTier",
    "EverySeconds",
    "EverySteps",
    "FileSystemCheckpointManager",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepLast",
    "KeepPolicy",
    "MemoryTier",
    "Never",
    "OnSignal",
    "SaveDecision",
    "SaveMoment",
    "SavePolicy",
    "TieredCheckpointManager",
    "YoungDaly",
    "get_checkpoint_manager",
    "set_checkpoint_manager",
]

_HOME_OF_NAME = {
    "AtSteps": "torchelastic.checkpoint.policy",
    "BCPState": "torchelastic.checkpoint.training_state.state",
    "Checkpoint": "torchelastic.checkpoint.api",
    "CheckpointError": "torchelastic.checkpoint.errors",
    "CheckpointManager": "torchelastic.checkpoint.api",
    "CorruptCheckpointError": "torchelastic.checkpoint.errors",
    "DCPState": "torchelastic.checkpoint.training_state.state",
    "DiskTier": "torchelastic.checkpoint.store",
    "DurableTier": "torchelastic.checkpoint.store",
    "EverySeconds": "torchelastic.checkpoint.policy",
    "EverySteps": "torchelastic.checkpoint.policy",
    "FileSystemCheckpointManager": "torchelastic.checkpoint.file_system",
    "KeepAll": "torchelastic.checkpoint.policy",
    "KeepBest": "torchelastic.checkpoint.policy",
    "KeepEvery": "torchelastic.checkpoint.policy",
    "KeepEverySeconds": "torchelastic.checkpoint.policy",
    "KeepLast": "torchelastic.checkpoint.policy",
    "KeepPolicy": "torchelastic.checkpoint.policy",
    "MemoryTier": "torchelastic.checkpoint.store",
    "Never": "torchelastic.checkpoint.policy",
    "OnSignal": "torchelastic.checkpoint.policy",
    "SaveDecision": "torchelastic.checkpoint.policy",
    "SaveMoment": "torchelastic.checkpoint.policy",
    "SavePolicy": "torchelastic.checkpoint.policy",
    "TieredCheckpointManager": "torchelastic.checkpoint.tiered.manager",
    "YoungDaly": "torchelastic.checkpoint.policy",
    "get_checkpoint_manager": "torchelastic.checkpoint.api",
    "set_checkpoint_manager": "torchelastic.checkpoint.api",
}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
