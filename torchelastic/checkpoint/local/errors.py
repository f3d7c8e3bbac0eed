"""What can go wrong with local checkpoints besides what is stored being bad."""

from __future__ import annotations

from torchelastic.checkpoint.errors import CheckpointError


class OutOfStepError(CheckpointError):
    """The ranks did not call the same method of the manager, or one of them did not call it in time; names them."""
