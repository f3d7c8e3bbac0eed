"""The callback that has a trainer of Lightning save checkpoints in memory, whichever package it derives from."""

from __future__ import annotations

from typing import Any

from torchelastic.adapters.lightning.callback import BatchEndSaver, find_plugin
from torchelastic.adapters.lightning.memory_io import MemoryCheckpointing, put_flags_back
from torchelastic.adapters.memory_tier import AnyPath, container_of, is_due
from torchelastic.checkpoint.policy.arguments import whole_number


class MemorySaving(BatchEndSaver):
    """Saves checkpoints in memory between the durable ones. Needs a trainer wrapped by `wrap_trainer_and_auto_resume`.

    It saves at the end of a batch, on all ranks, when all other callbacks have run, after optimizer steps whose number
    `every_n_steps` divides and `skip_every_n_steps` does not. When `fit` has ended without an exception, and the
    trainer has finished the durable saves of its plugin, the container is removed. It is no `ModelCheckpoint`.

    Args:
        checkpoint_base_container: as given to the wrapper; None: derived from the run id, see `job_container`.
        every_n_steps: optimizer steps (`trainer.global_step`) from save to save.
        skip_every_n_steps: the interval of durable checkpoints: at their steps nothing is saved in memory. None or 0:
            nothing is skipped.
        enabled: false: it does nothing at all.
        keep_on_train_end: leave the container where it is.
        keep_mlf_checkpoint_on_train_end: the same, by ML Flashpoint's name.

    Raises:
        TypeError: an interval is no whole number.
        ValueError: it is too small, or the container is no absolute path.
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
        whole_number("every_n_steps", every_n_steps, at_least=1, remedy="give 1 or more, or enabled=False")
        remedy = "give the interval of durable checkpoints"
        whole_number("skip_every_n_steps", skip_every_n_steps or 0, at_least=0, remedy=remedy)
        self.container = container_of(checkpoint_base_container) if enabled else None
        self.every_n_steps, self.skip_every_n_steps = every_n_steps, skip_every_n_steps
        self.enabled = enabled
        self.keep_on_train_end = self._saves_last_step = keep_on_train_end or keep_mlf_checkpoint_on_train_end

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
            self._run_last(trainer)
            plugin.start()

    def _is_due(self, trainer: Any, step: int) -> bool:
        every, skip = self.every_n_steps, self.skip_every_n_steps
        return self._acts(trainer) and is_due(step, every, skip)

    def _save(self, trainer: Any, step: int, checkpoint: dict[str, Any]) -> None:
        plugin = memory_io_of(trainer)
        plugin.save_checkpoint(checkpoint, plugin.path_of(step))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins, or resumes from a checkpoint: flags are put back as they were."""
        super().on_train_start(trainer, pl_module)
        if self._acts(trainer):
            put_flags_back(memory_io_of(trainer))

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


def memory_io_of(trainer: Any) -> MemoryCheckpointing:
    """The trainer's plugin for checkpoints in memory. Raises TypeError: it has none."""
    plugin = find_plugin(trainer, MemoryCheckpointing)
    if plugin is None:
        raise TypeError(
            "MemoryCheckpointCallback needs a trainer that was wrapped: call wrap_trainer_and_auto_resume(trainer, "
            "container, async_save=True) before fit"
        )
    return plugin
