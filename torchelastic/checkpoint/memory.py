"""Checkpoints in memory for torch.distributed.checkpoint: on tmpfs, with a replica on another host.

The front door after ML Flashpoint. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId as CheckpointContainerId
    from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointId as CheckpointId
    from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointObjectId as CheckpointObjectId
    from torchelastic.checkpoint.compat.flashpoint.job import job_container as job_container
    from torchelastic.checkpoint.compat.flashpoint.loader import CheckpointLoader as CheckpointLoader
    from torchelastic.checkpoint.compat.flashpoint.loader import DefaultCheckpointLoader as DefaultCheckpointLoader
    from torchelastic.checkpoint.compat.flashpoint.object_manager import (
        CheckpointObjectManager as CheckpointObjectManager,
    )
    from torchelastic.checkpoint.compat.flashpoint.reader import MemoryStorageReader as MemoryStorageReader
    from torchelastic.checkpoint.compat.flashpoint.saver import DefaultCheckpointSaver as DefaultCheckpointSaver
    from torchelastic.checkpoint.compat.flashpoint.staged_items import StagedItems as StagedItems
    from torchelastic.checkpoint.compat.flashpoint.writer import MemoryStorageWriter as MemoryStorageWriter

__getattr__, __dir__ = lazily(__name__)
