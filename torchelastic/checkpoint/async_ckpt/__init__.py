"""Checkpoints that are written while training goes on: requests, the queue that runs them, and what finalises them.

Names are loaded on first use (PEP 562), so that importing this package costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.async_ckpt.calls_queue import AsyncCallsQueue, abort_checkpoints
    from torchelastic.checkpoint.async_ckpt.errors import AsyncCheckpointError
    from torchelastic.checkpoint.async_ckpt.request import AsyncRequest
    from torchelastic.checkpoint.async_ckpt.torch_checkpoint import TorchAsyncCheckpoint

__all__ = [
    "AsyncCallsQueue",
    "AsyncCheckpointError",
    "AsyncRequest",
    "TorchAsyncCheckpoint",
    "abort_checkpoints",
]

_HOME_OF_NAME = {
    "AsyncCallsQueue": "calls_queue",
    "AsyncCheckpointError": "errors",
    "AsyncRequest": "request",
    "TorchAsyncCheckpoint": "torch_checkpoint",
    "abort_checkpoints": "calls_queue",
}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
