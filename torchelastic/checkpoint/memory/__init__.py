"""Checkpoints in memory for torch.distributed.checkpoint: on tmpfs, with a replica on another host.

The front door after ML Flashpoint. Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.memory.ids import CheckpointContainerId, CheckpointId, CheckpointObjectId
    from torchelastic.checkpoint.memory.job import job_container
    from torchelastic.checkpoint.memory.loader import CheckpointLoader, DefaultCheckpointLoader
    from torchelastic.checkpoint.memory.objects import CheckpointObjectManager
    from torchelastic.checkpoint.memory.reader import MemoryStorageReader
    from torchelastic.checkpoint.memory.saver import DefaultCheckpointSaver
    from torchelastic.checkpoint.memory.staging import StagedItems
    from torchelastic.checkpoint.memory.writer import MemoryStorageWriter

__all__ = [
    "CheckpointContainerId",
    "CheckpointId",
    "CheckpointLoader",
    "CheckpointObjectId",
    "CheckpointObjectManager",
    "DefaultCheckpointLoader",
    "DefaultCheckpointSaver",
    "MemoryStorageReader",
    "MemoryStorageWriter",
    "StagedItems",
    "job_container",
]

_MODULE_OF_NAME = {
    "CheckpointContainerId": "ids",
    "CheckpointId": "ids",
    "CheckpointLoader": "loader",
    "CheckpointObjectId": "ids",
    "CheckpointObjectManager": "objects",
    "DefaultCheckpointLoader": "loader",
    "DefaultCheckpointSaver": "saver",
    "MemoryStorageReader": "reader",
    "MemoryStorageWriter": "writer",
    "StagedItems": "staging",
    "job_container": "job",
}

__getattr__, __dir__ = lazily(__name__, _MODULE_OF_NAME)
