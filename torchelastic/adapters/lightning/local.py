"""What a callback and a checkpoint plugin of Lightning do for local checkpoints, whichever package they derive from."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torchelastic.adapters.lightning.beside import StoredBeside
from torchelastic.adapters.lightning.callback import BatchEndSaver, find_plugin
from torchelastic.adapters.values import mapped
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, TensorAwareStateDict

if TYPE_CHECKING:
    from torchelastic.checkpoint.local import BaseCheckpointManager

log = logging.getLogger(__name__)

#: The storage option of a local save.
LOCAL_CKPT_OPTS_KEY = "local_checkpoint_options"
#: As `ckpt_path`: the newest local checkpoint, where there is no durable one yet.
LOCAL_CHECKPOINT = "local"


class LocalCheckpointing(BatchEndSaver):
    """Has the trainer save local checkpoints between the durable ones. Needs `HierarchicalCheckpointIO` as a plugin.

    It saves at the end of a batch, on all ranks, when all other callbacks have run. It is no `ModelCheckpoint`: the
    trainer still adds its own.

    Args:
        every_n_train_steps: save when so many optimizer steps were taken since the last multiple.
        train_time_interval: save when so much time has passed since the last save, by the clock of rank 0.
        clock: monotonic seconds.

    Raises:
        ValueError: not exactly one of the two is given, or it is not above 0.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if (every_n_train_steps is None) == (train_time_interval is None):
            raise ValueError("give either every_n_train_steps or train_time_interval")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps is {every_n_train_steps}: give 1 or more")
        if train_time_interval is not None and train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval is {train_time_interval}: give a time above 0")
        self._every_n_train_steps, self._train_time_interval = every_n_train_steps, train_time_interval
        self._clock = clock
        self._last_s = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Prepares the plugin. Raises: TypeError if there is none."""
        plugin = self._plugin(trainer)
        plugin.is_fitting = stage == "fit"
        plugin._trainer = trainer
        self._run_last(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins, or resumes from a checkpoint: flags are put back as they were."""
        super().on_train_start(trainer, pl_module)
        self._last_s = self._clock()
        self._plugin(trainer)._beside.put_flags(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Waits until all saves are complete."""
        self._plugin(trainer).maybe_finalize_save_checkpoint(blocking=True)

    def _is_due(self, trainer: Any, step: int) -> bool:
        self._plugin(trainer).maybe_finalize_save_checkpoint()
        if self._every_n_train_steps is not None:
            return step % self._every_n_train_steps == 0
        interval_s = self._train_time_interval.total_seconds() if self._train_time_interval else 0.0
        return bool(trainer.strategy.broadcast(self._clock() - self._last_s >= interval_s))

    def _save(self, trainer: Any, step: int, checkpoint: dict[str, Any]) -> None:
        self._last_s = self._clock()
        options = {LOCAL_CKPT_OPTS_KEY: {"ckpt_type": "local", "iteration": step}}
        plugin = self._plugin(trainer)
        # a form of the user's own has what Lightning has
        is_usual = type(plugin).to_tensor_aware_state_dict is HierarchicalCheckpointing.to_tensor_aware_state_dict
        checkpoint = plugin._beside.added_to(checkpoint, trainer) if is_usual else checkpoint
        plugin.save_checkpoint(checkpoint, None, storage_options=options)

    @staticmethod
    def _plugin(trainer: Any) -> HierarchicalCheckpointing:
        plugin = find_plugin(trainer, HierarchicalCheckpointing)
        if plugin is None:
            raise TypeError(
                "LocalCheckpointCallback needs a HierarchicalCheckpointIO: give the trainer "
                "plugins=[HierarchicalCheckpointIO(TorchCheckpointIO(), manager, get_global_ckpt_iteration_fn)]"
            )
        return plugin


class HierarchicalCheckpointing:
    """Saves durable checkpoints with another plugin and local ones with a manager; loads whichever is newer.

    A save is local if its storage options say so, under `LOCAL_CKPT_OPTS_KEY`: `ckpt_type` "local", `iteration`, and,
    if that is not to be as `async_save` says, `is_async`. All ranks have to make it. A local save neither counts as a
    durable one nor removes any.

    Args:
        wrapped_checkpoint_io: for the durable checkpoints.
        local_ckpt_manager: for the local ones.
        get_global_ckpt_iteration_fn: the global step of the durable checkpoint at a path; called on all ranks.
        async_save: write local checkpoints in the background, on a thread.
    """

    def __init__(
        self,
        wrapped_checkpoint_io: Any,
        local_ckpt_manager: BaseCheckpointManager,
        get_global_ckpt_iteration_fn: Callable[[Any], int],
        async_save: bool = False,
    ) -> None:
        super().__init__()
        self.wrapped_checkpoint_io = wrapped_checkpoint_io
        self.local_ckpt_manager = local_ckpt_manager
        self.get_global_ckpt_iteration_fn = get_global_ckpt_iteration_fn
        self.async_save = async_save
        #: Whether local checkpoints may be loaded in place of durable ones: not to test the best model, for example.
        self.is_fitting = True
        self._queue: AsyncCallsQueue | None = None
        self._beside, self._trainer = StoredBeside(), None

    @classmethod
    def get_partial_wrapper_constructor(
        cls,
        local_ckpt_manager: BaseCheckpointManager,
        get_global_ckpt_iteration_fn: Callable[[Any], int],
        async_save: bool = False,
    ) -> Callable[[Any], Any]:
        """What makes a plugin of the one to be wrapped; arguments as for the constructor."""
        return partial(
            cls,
            local_ckpt_manager=local_ckpt_manager,
            get_global_ckpt_iteration_fn=get_global_ckpt_iteration_fn,
            async_save=async_save,
        )

    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> TensorAwareStateDict:
        """How a checkpoint of Lightning's is given to the manager; override it for other than nested plain values."""
        return BasicTensorAwareStateDict(mapped(checkpoint))  # plain dicts: not AttributeDict

    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint: TensorAwareStateDict) -> dict[str, Any]:
        """The inverse of `to_tensor_aware_state_dict`."""
        tree: dict[str, Any] = tensor_aware_checkpoint.to_tree()
        return tree

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str] | None, storage_options: Any = None
    ) -> None:
        """Saves here or durably, as the storage options say; see the class and `LocalCheckpointManager.save`.

        Raises:
            ValueError: the options ask for another kind of checkpoint.
        """
        options = storage_options.get(LOCAL_CKPT_OPTS_KEY) if isinstance(storage_options, Mapping) else None
        if options is None:
            self.wrapped_checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if options.get("ckpt_type") != "local":
            raise ValueError(
                f"ckpt_type is {options.get('ckpt_type')!r}: give 'local', or leave {LOCAL_CKPT_OPTS_KEY} out"
            )
        request = self.local_ckpt_manager.save(
            self.to_tensor_aware_state_dict(checkpoint),
            int(options["iteration"]),
            is_async=bool(options.get("is_async", self.async_save)),
        )
        if request is not None:
            if self._queue is None:
                self._queue = AsyncCallsQueue(worker="thread")  # a local save is a snapshot already
            self._queue.schedule_async_request(request)

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> None:
        """Finalises local saves that all ranks have written. Called on all ranks.

        Args:
            blocking: wait for all of them.
        """
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the local checkpoint if it is at least as new as the durable one at the path. Called on all ranks.

        Args:
            path: of the durable one; `LOCAL_CHECKPOINT` if there is none.
            map_location: for the durable one.
            weights_only: for the durable one.

        Raises:
            CheckpointError: there is no durable one, and the local one cannot be loaded.
            OutOfStepError: a rank does not come; names it.
        """
        must_be_local = path == LOCAL_CHECKPOINT
        global_step = -1 if must_be_local else self.get_global_ckpt_iteration_fn(path)
        local_step = self.local_ckpt_manager.find_latest() if self.is_fitting or must_be_local else -1
        if must_be_local or (local_step != -1 and local_step >= global_step):
            try:
                state, ckpt_id = self.local_ckpt_manager.load()
            except CheckpointError as error:  # on all ranks alike
                if must_be_local or isinstance(error, OutOfStepError):
                    raise
                log.warning("step %d: the local checkpoint is skipped for %s: %s", local_step, path, error)
            else:
                log.info("loading the local checkpoint of step %d, not %s", ckpt_id.iteration, path)
                checkpoint = self.from_tensor_aware_state_dict(state)
                self._beside.notice(self._trainer)
                self._beside.take(self._trainer, checkpoint)
                return checkpoint
        options = {} if weights_only is None else {"weights_only": weights_only}
        loaded: dict[str, Any] = self.wrapped_checkpoint_io.load_checkpoint(path, map_location=map_location, **options)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a durable checkpoint; local ones are the manager's."""
        self.wrapped_checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """The trainer ends: what is still being written is called off, which after a finished run is nothing."""
        if self._queue is not None:
            self._queue.close(abort=True)
            self._queue = None
        self.wrapped_checkpoint_io.teardown()
