"""The order of a trainer's callbacks."""

from __future__ import annotations

from typing import Any


def run_last(trainer: Any, callback: Any) -> None:
    """Has a callback run after all others of a trainer, wherever it stands in the user's list.

    Who saves at the end of a batch must be last: what another callback still does at that end would be missing in the
    checkpoint, and would not be done again when the run goes on with the next batch. Lightning puts its own callbacks
    for checkpoints last for the same reason.

    Args:
        trainer: whose hook `setup` is under way, or no hook.
        callback: one of its callbacks.
    """
    # another list: Lightning may be iterating over the present one
    trainer.callbacks = [*(one for one in trainer.callbacks if one is not callback), callback]
