"""Checkpoints: what is saved where, by whom, and how it is found again. This page is the map.

Rooms, lowest first: `format` (one file, a shard, for everything), `policy` (when to save, what to keep; pure), `store`
(what makes a checkpoint, and the tiers where it lies), `replicas` (copies on other hosts), `engine` (saves and
restores of all ranks together), `compat` (the five systems whose users come here), `command` (`torchelastic
checkpoint`). `checkpoint_manager.py` says what a manager is, `loop_checkpoints.py` is the train loop's side; `api`,
`memory`, `local`, `async_ckpt`, `replication`, `shards` beside this file are names to import.

A save of every rank, `TieredCheckpointManager.save_step` (`engine/tiered_manager.py`):

1. `policy` says that it pays (`engine/schedule.py`); all ranks call it after the same committed step.
2. The state becomes a tree of plain values and named tensors (`format/tree.py`), laid out as one shard a rank
   (`format/layout.py`) and copied into a slot of warm memory (`format/stage.py`): only this stops the training.
3. On a thread (`engine/finishing.py`): checksums seal the shard, and each tier of `store` puts it.
4. Memory has copies on other hosts (`engine/replicas.py`, pushed by `replicas/replica_client.py`).
5. Each rank notes what it has stored (`engine/save_agreement.py`). With the notes of all, rank 0 writes the manifest
   (`store/manifest.py`): from then on the checkpoint exists.
6. What `policy/keeping.py` does not keep is removed (`store/folder_tier.py`); a rank that was replaced can do neither
   (`store/fence.py`).

A restore, `TieredCheckpointManager.restore` (`engine/tiered_restore.py`), on all ranks of a new group:

1. The ranks agree on an epoch, which fences the writers of before (`engine/epoch.py`).
2. Each lists what its tiers hold (`store/inventory.py`), and serves it to the others (`replicas/replica_server.py`).
3. `store/restore_plan.py` decides from all lists which checkpoint is the newest that exists whole, and who gets which
   shard from whom (pure, the same answer on each rank).
4. Shards are read where they lie or from another rank; nothing is handed out before its checksum was compared
   (`format/shard_reader.py`). A damaged copy is skipped for another one, then for an older checkpoint
   (`engine/restorer.py`).
5. What each rank takes of them (`engine/read_rules.py`) is put together for any number of ranks (`format/loading.py`)
   and loaded into the state.
6. Copies that were missing or damaged are made again (`engine/replicas.py`, `engine/group_folders.py`).

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.checkpoint_manager import Checkpoint as Checkpoint
    from torchelastic.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from torchelastic.checkpoint.checkpoint_manager import get_checkpoint_manager as get_checkpoint_manager
    from torchelastic.checkpoint.checkpoint_manager import set_checkpoint_manager as set_checkpoint_manager
    from torchelastic.checkpoint.compat.elastic01.file_system import (
        FileSystemCheckpointManager as FileSystemCheckpointManager,
    )
    from torchelastic.checkpoint.compat.velastic.bcp_state import BCPState as BCPState
    from torchelastic.checkpoint.compat.velastic.bcp_state import DCPState as DCPState
    from torchelastic.checkpoint.engine.tiered_manager import TieredCheckpointManager as TieredCheckpointManager
    from torchelastic.checkpoint.errors import CheckpointError as CheckpointError
    from torchelastic.checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
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
    from torchelastic.checkpoint.policy.schedules import OnEnd as OnEnd
    from torchelastic.checkpoint.policy.schedules import OnSignal as OnSignal
    from torchelastic.checkpoint.policy.young_daly import YoungDaly as YoungDaly
    from torchelastic.checkpoint.store.disk_tier import DiskTier as DiskTier
    from torchelastic.checkpoint.store.durable_tier import DurableTier as DurableTier
    from torchelastic.checkpoint.store.memory_tier import MemoryTier as MemoryTier

__getattr__, __dir__ = lazily(__name__)
