"""Durable checkpoints: what is saved where, and how it is found again.

Below it: `policy` (when to save, what to keep), `shards` (one file format, read by any number of ranks), `store`
(what makes a checkpoint, and the places for it), `replication` (copies on other hosts). On these stand the kinds of
checkpoints: `tiered`, `training_state` (velastic's names), `memory` (for DCP, with ML Flashpoint's names), `local`
and `async_ckpt` (NVRx's names); and `command`. For all of them `restore_plan.py` decides which checkpoint is
restored, and who gets which shard from whom; `durable_copies.py` gives those in memory copies in durable storage.

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
    from torchelastic.checkpoint.api import Checkpoint as Checkpoint
    from torchelastic.checkpoint.api import CheckpointManager as CheckpointManager
    from torchelastic.checkpoint.api import get_checkpoint_manager as get_checkpoint_manager
    from torchelastic.checkpoint.api import set_checkpoint_manager as set_checkpoint_manager
    from torchelastic.checkpoint.errors import CheckpointError as CheckpointError
    from torchelastic.checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
    from torchelastic.checkpoint.file_system import FileSystemCheckpointManager as FileSystemCheckpointManager
    from torchelastic.checkpoint.policy.keeping import KeepAll as KeepAll
    from torchelastic.checkpoint.policy.keeping import KeepBest as KeepBest
    from torchelastic.checkpoint.policy.keeping import KeepEvery as KeepEvery
    from torchelastic.checkpoint.policy.keeping import KeepEverySeconds as KeepEverySeconds
    from torchelastic.checkpoint.policy.keeping import KeepLast as KeepLast
    from torchelastic.checkpoint.policy.keeping import KeepPolicy as KeepPolicy
    from torchelastic.checkpoint.policy.saving import SaveDecision as SaveDecision
    from torchelastic.checkpoint.policy.saving import SaveMoment as SaveMoment
    from torchelastic.checkpoint.policy.saving import SavePolicy as SavePolicy
    from torchelastic.checkpoint.policy.schedules import AtSteps as AtSteps
    from torchelastic.checkpoint.policy.schedules import EverySeconds as EverySeconds
    from torchelastic.checkpoint.policy.schedules import EverySteps as EverySteps
    from torchelastic.checkpoint.policy.schedules import Never as Never
    from torchelastic.checkpoint.policy.schedules import OnSignal as OnSignal
    from torchelastic.checkpoint.policy.young_daly import YoungDaly as YoungDaly
    from torchelastic.checkpoint.store.disk import DiskTier as DiskTier
    from torchelastic.checkpoint.store.durable import DurableTier as DurableTier
    from torchelastic.checkpoint.store.memory import MemoryTier as MemoryTier
    from torchelastic.checkpoint.tiered.manager import TieredCheckpointManager as TieredCheckpointManager
    from torchelastic.checkpoint.training_state.state import BCPState as BCPState
    from torchelastic.checkpoint.training_state.state import DCPState as DCPState

__getattr__, __dir__ = lazily(__name__)
