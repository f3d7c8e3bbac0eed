"""What callbacks of Lightning that save at the end of a batch share; and the search for their checkpoint plugin."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

Plugin = TypeVar("Plugin")


class BatchEndSaving:
    """Saves at the end of a batch, on all ranks, after all other callbacks. It is no `ModelCheckpoint`.

    Which checkpoint is the best or the last, or whether one was saved on exit, is left to the trainer's own.
    """

    _last_step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Training begins, or resumes from a checkpoint."""
        self._last_step = int(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002 - Lightning's signature
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Saves if that is due. Raises: as the plugin's `save_checkpoint`."""
        step = int(trainer.global_step)
        if self._is_due(trainer, step):
            self._last_step = step
            # not through the strategy, which may save on rank 0 only
            self._save(trainer, step, trainer._checkpoint_connector.dump_checkpoint(weights_only=False))

    @abstractmethod
    def _is_due(self, trainer: Any, step: int) -> bool:
        """Whether to save after this optimizer step; called after every batch, on all ranks."""

    @abstractmethod
    def _save(self, trainer: Any, step: int, checkpoint: dict[str, Any]) -> None:
        """Saves a checkpoint."""

    def _run_last(self, trainer: Any) -> None:
        """Moves this behind all other callbacks, wherever it is in the user's list; call it in the hook `setup`.

        What another callback still does at the end of a batch would be missing in the checkpoint, and would not be done
        again when the run resumes with the next batch. Lightning moves its own checkpoint callbacks likewise.
        """
        # another list: Lightning may be iterating over the present one
        trainer.callbacks = [*(one for one in trainer.callbacks if one is not self), self]


def find_plugin(trainer: Any, kind: type[Plugin]) -> Plugin | None:
    """The trainer's checkpoint plugin of a kind, also inside of others (Lightning's, or ours); None: it has none."""
    plugin = trainer.strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, kind):
        plugin = getattr(plugin, "checkpoint_io", None) or getattr(plugin, "wrapped_checkpoint_io", None)
    return plugin
