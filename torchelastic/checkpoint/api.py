"""What a checkpoint and its manager are, and how to save and load one by hand. See `checkpoint_manager`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.checkpoint_manager import DEFAULT_KEY as DEFAULT_KEY
    from torchelastic.checkpoint.checkpoint_manager import Checkpoint as Checkpoint
    from torchelastic.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from torchelastic.checkpoint.checkpoint_manager import SavableState as SavableState
    from torchelastic.checkpoint.checkpoint_manager import get_checkpoint_manager as get_checkpoint_manager
    from torchelastic.checkpoint.checkpoint_manager import load_latest as load_latest
    from torchelastic.checkpoint.checkpoint_manager import save as save
    from torchelastic.checkpoint.checkpoint_manager import set_checkpoint_manager as set_checkpoint_manager
    from torchelastic.checkpoint.compat.elastic01.file_system import (
        FileSystemCheckpointManager as FileSystemCheckpointManager,
    )
    from torchelastic.checkpoint.errors import CheckpointError as CheckpointError
    from torchelastic.checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError

__getattr__, __dir__ = lazily(__name__)
