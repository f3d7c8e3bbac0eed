"""What callbacks of Lightning that save at the end of a batch share; and the search for their checkpoint plugin."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, TypeVar

from torchelastic.data.epochs import EpochLoader, EpochStream

Plugin = TypeVar("Plugin")


class BatchEndSaver:
    """Saves at the end of a batch, on all ranks, after all other callbacks. It is no `ModelCheckpoint`.

    Which checkpoint is the best or the last, or whether one was saved on exit, is left to the trainer's own.

    A trainer that goes on from the end of a batch leaves out what followed it: the validation, the end of the epoch or
    of the training, with the durable checkpoints that are saved there. So a save that is due at such a batch is put off
    to the next step, but not further, if something follows that as well.
    """

    _last_step = -1
    _is_deferred = False
    _saves_last_step = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Nothing is loaded yet: has the trainer find its place in the data after any checkpoint."""
        trainer.fit_loop._load_combined_loader_states = partial(_load_places, trainer.fit_loop)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Training begins, or resumes from a checkpoint."""
        self._last_step, self._is_deferred = int(trainer.global_step), False

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
        if step == self._last_step:  # gradients are accumulated over several batches
            return
        self._last_step = step
        was_deferred, self._is_deferred = self._is_deferred, False
        if not (self._is_due(trainer, step) or was_deferred):
            return
        if _ends(trainer.fit_loop):
            self._is_deferred = not self._saves_last_step
        else:
            self._is_deferred = _more_follows(trainer.fit_loop) and not was_deferred
        if self._is_deferred:
            return
        # not through the strategy, which may save on rank 0 only
        self._save(trainer, step, trainer._checkpoint_connector.dump_checkpoint(weights_only=False))

    @abstractmethod
    def _is_due(self, trainer: Any, step: int) -> bool:
        """Whether to save after this optimizer step; called once after each, on all ranks."""

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


def _load_places(loop: Any) -> None:
    """Loads the places of the training data, in place of Lightning's method.

    That leaves out those saved at the end of an epoch, as for a loader that begins each epoch alike; one that counts
    epochs would begin with the first.
    """
    loader, states = loop._combined_loader, loop._combined_loader_states_to_load
    stateful = [one for one in loader.flattened if hasattr(one, "load_state_dict")]
    if states and (loop.restarting or all(isinstance(one, EpochLoader | EpochStream) for one in stateful)):
        loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []


def _ends(loop: Any) -> bool:
    """Whether the training ends with the present batch."""
    epochs = loop.epoch_progress.current.processed + loop.epoch_loop._num_ready_batches_reached()
    return bool(0 <= loop.max_steps <= loop.epoch_loop.global_step or 0 <= (loop.max_epochs or -1) <= epochs)


def _more_follows(loop: Any) -> bool:
    """Whether a validation, or the end of an epoch, follows the present batch: the same on all ranks."""
    if loop.epoch_loop._is_training_done:
        return True
    if getattr(loop.trainer, "_val_check_time_interval", None) is not None:  # by each rank's own clock
        return False
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def find_plugin(trainer: Any, kind: type[Plugin]) -> Plugin | None:
    """The trainer's checkpoint plugin of a kind, also inside of others (Lightning's, or ours); None: it has none."""
    plugin = trainer.strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, kind):
        plugin = getattr(plugin, "checkpoint_io", None) or getattr(plugin, "wrapped_checkpoint_io", None)
    return plugin
