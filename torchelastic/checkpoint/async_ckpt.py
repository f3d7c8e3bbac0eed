"""Checkpoints that are written while training goes on: requests, the queue that runs them, and what finalises them.

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.calls_queue import AsyncCallsQueue as AsyncCallsQueue
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.calls_queue import abort_checkpoints as abort_checkpoints
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.failed_call import AsyncCheckpointError as AsyncCheckpointError
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest as AsyncRequest
    from torchelastic.checkpoint.compat.nvrx.async_ckpt.torch_checkpoint import (
        TorchAsyncCheckpoint as TorchAsyncCheckpoint,
    )

__getattr__, __dir__ = lazily(__name__)
