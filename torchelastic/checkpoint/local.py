"""Checkpoints that lie on the hosts that train, and copies of them on other hosts; see docs/checkpoint-interfaces.md.

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.local.base_manager import BaseCheckpointManager as BaseCheckpointManager
    from torchelastic.checkpoint.compat.nvrx.local.local_manager import LocalCheckpointManager as LocalCheckpointManager
    from torchelastic.checkpoint.compat.nvrx.local.names import CkptID as CkptID
    from torchelastic.checkpoint.compat.nvrx.local.state_dict import (
        BasicTensorAwareStateDict as BasicTensorAwareStateDict,
    )
    from torchelastic.checkpoint.compat.nvrx.local.state_dict import TensorAwareStateDict as TensorAwareStateDict
    from torchelastic.checkpoint.compat.nvrx.local.state_dict import TensorPlaceholder as TensorPlaceholder
    from torchelastic.checkpoint.errors import OutOfStepError as OutOfStepError

__getattr__, __dir__ = lazily(__name__)
