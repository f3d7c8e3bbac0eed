"""The callback that has a trainer of Lightning save checkpoints in memory, whichever package it derives from."""

from __future__ import annotations

from typing import Any

from torchelastic.adapters.lightning.memory_io import AnyPath, MemoryCheckpointing, container_of
from torchelastic.adapters.lightning.order import run_last


class MemorySaving:
    """Saves checkpoints in memory between the durable ones. Needs a trainer wrapped by `wrap_trainer_and_auto_resume`.

    It saves at the end of a batch, on all ranks, when all other callbacks have run, after optimizer steps whose number
    `every_n_steps` divides and `skip_every_n_steps` does not. When `fit` has ended without an exception, and the
    trainer has finished the durable saves of its plugin, the container is removed. It is no `ModelCheckpoint`: which
    checkpoint is the best or the last is not its business.

    Args:
        checkpoint_base_container: as given to the wrapper; None: derived from the run id, see `job_container`.
        every_n_steps: optimizer steps (`trainer.global_step`) from save to save.
        skip_every_n_steps: the interval of durable checkpoints: at their steps nothing is saved in memory. None or 0:
            nothing is skipped.
        enabled: false: it does nothing at all.
        keep_on_train_end: leave the container where it is.
        keep_mlf_checkpoint_on_train_end: the same, by ML Flashpoint's name.

    Raises:
        ValueError: an interval is not a number of steps, or the container no absolute path.
    """

    def __init__(
        self,
        checkpoint_base_container: AnyPath | None,
        every_n_steps: int,
        skip_every_n_steps: int | None = None,
        enabled: bool = True,
        keep_on_train_end: bool = False,
        *,
        keep_mlf_checkpoint_on_train_end: bool = False,
    ) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}: give 1 or more, or enabled=False")
        if skip_every_n_steps is not None and skip_every_n_steps < 0:
            raise ValueError(f"skip_every_n_steps is {skip_every_n_steps}: give the interval of durable checkpoints")
        self.container = container_of(checkpoint_base_container) if enabled else None
        self.every_n_steps, self.skip_every_n_steps = every_n_steps, skip_every_n_steps
        self.enabled = enabled
        self.keep_on_train_end = keep_on_train_end or keep_mlf_checkpoint_on_train_end
        self._last_step = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Opens the tier.

        Raises:
            TypeError: the trainer was not wrapped, or its strategy saves in a way that is not known here.
            ValueError: it was wrapped with another container.
            CheckpointError: the container cannot be used.
        """
        if self._acts(trainer) and stage == "fit":
            plugin = memory_io_of(trainer)
            if str(plugin.container) != str(self.container):
                raise ValueError(
                    f"the callback saves in {self.container} and the trainer was wrapped with {plugin.container}: "
                    "give both the same container"
                )
            run_last(trainer, self)
            plugin.start()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Training begins, or goes on from a checkpoint."""
        self._last_step = int(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002 - Lightning's signature
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Saves if it is time to. Raises: as `MemoryCheckpointIO.save_checkpoint`."""
        step = int(trainer.global_step)
        if not self._acts(trainer) or not is_due(step, self._last_step, self.every_n_steps, self.skip_every_n_steps):
            return
        self._last_step = step
        plugin = memory_io_of(trainer)
        # not through the strategy, which may save on rank 0 only
        plugin.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), plugin.path_of(step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Waits until the last save is complete. Raises: CheckpointError if it takes too long."""
        if self._acts(trainer):
            memory_io_of(trainer).tier.wait()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """The run is over: removes the container, unless it is to be kept.

        Lightning calls this neither after an exception nor before the plugin for durable checkpoints has ended, so at
        no moment does a run depend on a checkpoint that is gone.
        """
        if self._acts(trainer):
            tier = memory_io_of(trainer).tier
            tier.end() if self.keep_on_train_end else tier.remove(trainer.local_rank)

    def _acts(self, trainer: Any) -> bool:
        return self.enabled and not trainer.fast_dev_run


def is_due(step: int, last_step: int, every_n_steps: int, skip_every_n_steps: int | None) -> bool:
    """Whether to save at a step; not twice at one, which several batches share where gradients are accumulated.

    >>> [step for step in range(13) if is_due(step, 0, 3, 6)]
    [3, 9]
    """
    if step == last_step or step % every_n_steps:
        return False
    return not skip_every_n_steps or step % skip_every_n_steps != 0


def memory_io_of(trainer: Any) -> MemoryCheckpointing:
    """The trainer's plugin for checkpoints in memory.

    Raises:
        TypeError: it has none.
    """
    plugin = find_memory_io(trainer)
    if plugin is None:
        raise TypeError(
            "MemoryCheckpointCallback needs a trainer that was wrapped: call wrap_trainer_and_auto_resume(trainer, "
            "container, async_save=True) before fit"
        )
    return plugin


def find_memory_io(trainer: Any) -> MemoryCheckpointing | None:
    """The trainer's plugin for checkpoints in memory; None if it has none."""
    plugin = trainer.strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, MemoryCheckpointing):
        # wrapped by a plugin of Lightning's, or by HierarchicalCheckpointIO
        plugin = getattr(plugin, "checkpoint_io", None) or getattr(plugin, "wrapped_checkpoint_io", None)
    return plugin
