"""Checkpoints that lie on the hosts that train, and copies of them on other hosts; see docs/checkpoint-interfaces.md.

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.errors import OutOfStepError
    from torchelastic.checkpoint.local.base_manager import BaseCheckpointManager
    from torchelastic.checkpoint.local.local_manager import LocalCheckpointManager
    from torchelastic.checkpoint.local.names import CkptID
    from torchelastic.checkpoint.local.state_dict import (
        BasicTensorAwareStateDict,
        TensorAwareStateDict,
        TensorPlaceholder,
    )

__all__ = [
    "BaseCheckpointManager",
    "BasicTensorAwareStateDict",
    "CkptID",
    "LocalCheckpointManager",
    "OutOfStepError",
    "TensorAwareStateDict",
    "TensorPlaceholder",
]

_HOME_OF_NAME = {
    "BaseCheckpointManager": "base_manager",
    "BasicTensorAwareStateDict": "state_dict",
    "CkptID": "names",
    "LocalCheckpointManager": "local_manager",
    "OutOfStepError": "torchelastic.checkpoint.errors",
    "TensorAwareStateDict": "state_dict",
    "TensorPlaceholder": "state_dict",
}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
