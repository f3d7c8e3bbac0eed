"""Checkpoints in memory for torch.distributed.checkpoint: on tmpfs, with a replica on another host.

The front door after ML Flashpoint. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.memory.ids import CheckpointContainerId as CheckpointContainerId
    from torchelastic.checkpoint.memory.ids import CheckpointId as CheckpointId
    from torchelastic.checkpoint.memory.ids import CheckpointObjectId as CheckpointObjectId
    from torchelastic.checkpoint.memory.job import job_container as job_container
    from torchelastic.checkpoint.memory.loader import CheckpointLoader as CheckpointLoader
    from torchelastic.checkpoint.memory.loader import DefaultCheckpointLoader as DefaultCheckpointLoader
    from torchelastic.checkpoint.memory.objects import CheckpointObjectManager as CheckpointObjectManager
    from torchelastic.checkpoint.memory.reader import MemoryStorageReader as MemoryStorageReader
    from torchelastic.checkpoint.memory.saver import DefaultCheckpointSaver as DefaultCheckpointSaver
    from torchelastic.checkpoint.memory.staging import StagedItems as StagedItems
    from torchelastic.checkpoint.memory.writer import MemoryStorageWriter as MemoryStorageWriter

__getattr__, __dir__ = lazily(__name__)
