"""What a checkpoint plugin of Lightning does for checkpoints in memory, whichever package it derives from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic.adapters.lightning.beside import StoredBeside
from torchelastic.adapters.lightning.memory_state import names_of_optimizers, put_together, share_of, take_apart
from torchelastic.adapters.lightning.memory_strategies import Layout, layout_of, load_sharded, names_on_all_ranks
from torchelastic.adapters.memory_tier import AnyPath, StorageTier
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId

log = logging.getLogger(__name__)


def is_in(container: CheckpointContainerId, path: AnyPath) -> bool:
    """Whether a path is the container or lies in it; by its parts, so `/shm/job-10` does not lie in `/shm/job-1`.

    >>> is_in(CheckpointContainerId("/shm/job-1"), "/shm/job-10/step-5_ckpt")
    False
    """
    text = str(path)
    if "://" in text:
        return False
    return _absolute(text).is_relative_to(str(container))


def _absolute(path: AnyPath) -> Path:
    return Path(os.path.normpath(Path(str(path)).absolute()))


class MemoryCheckpointing:
    """Saves and loads checkpoints in the memory container of the job; all others are the wrapped plugin's.

    What has a path in the container goes to memory, and everything else to the wrapped plugin, unchanged. A checkpoint
    in memory is Lightning's whole one: model, optimizers, schedulers, loops, callbacks, hyper-parameters. As in its own
    checkpoints, what differs from rank to rank is that of rank 0. All ranks save and load, whatever the strategy.

    Made by `wrap_trainer_and_auto_resume`, which also has the strategy leave such paths to it.

    Args:
        checkpoint_base_container: of this job: an absolute path on tmpfs.
        wrapped_checkpoint_io: for the durable checkpoints.
        trainer: whose plugin it is.
        async_save: write in the background; the training goes on when the values are copied.
        allow_pickles: store objects that are neither plain values nor tensors as pickles, and run them when loading.
        tier_options: see `StorageTier`.

    Raises:
        ValueError: the container is no absolute path.
    """

    def __init__(
        self,
        checkpoint_base_container: AnyPath | None,
        wrapped_checkpoint_io: Any,
        trainer: Any,
        async_save: bool = True,
        *,
        allow_pickles: bool = False,
        **tier_options: Any,
    ) -> None:
        super().__init__()
        self.tier = StorageTier(checkpoint_base_container, async_save=async_save, **tier_options)
        self.container = self.tier.container
        self.wrapped_checkpoint_io = wrapped_checkpoint_io
        self.trainer = trainer
        self.allow_pickles = allow_pickles
        #: What is loaded where a checkpoint in memory cannot be; set by `MemoryAutoResume`.
        self.fallback: AnyPath | None = None
        self._has_warned = False
        self._beside = StoredBeside()

    def is_in_memory(self, path: AnyPath) -> bool:
        """Whether a path lies in the container."""
        return is_in(self.container, path)

    def path_of(self, step: int) -> str:
        """Where the checkpoint of one step lies."""
        return self.tier.path_of(step)

    def start(self) -> None:
        """Opens the tier, if it is not open. All ranks call it, when the process group is there.

        Raises:
            TypeError: the trainer's strategy saves in a way that is not known here.
            ValueError: it gathers what is sharded.
        """
        layout_of(self.trainer.strategy)
        self.tier.start()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Saves in memory or durably, as the path says. All ranks call it for one in memory.

        Args:
            checkpoint: what `dump_checkpoint` made.
            path: `<container>/step-<N>_ckpt`, or of a durable one.
            storage_options: for the durable one.

        Raises:
            TypeError: the checkpoint holds what cannot be stored; names it.
            ValueError: the path lies in the container and is no step's.
            CheckpointError: the save before it does not end, or another rank cannot save.
        """
        if not self.is_in_memory(path):
            self.wrapped_checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        checkpoint_id = self._step_container(path)
        self.start()
        layout = layout_of(self.trainer.strategy)
        is_sharded = layout is Layout.SHARDED
        checkpoint = self._beside.added_to(checkpoint, self.trainer)
        parts = self.tier.ranks.own_on_all(
            f"save {Path(checkpoint_id).name}",
            lambda: take_apart(checkpoint, is_sharded=is_sharded, allow_pickles=self.allow_pickles),
        )
        self._warn_of(parts.skipped)
        everywhere = names_on_all_ranks(self.trainer.strategy, layout, parts.tensors)
        if layout is Layout.REPLICATED:
            everywhere |= names_of_optimizers(parts.tensors)
        self.tier.save(checkpoint_id, share_of(self.trainer.global_rank, parts.tensors, everywhere))

    def load_checkpoint(self, path: AnyPath, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Loads from memory or from the durable checkpoint, as the path says. All ranks call it.

        Where one in memory cannot be loaded, the durable one is that `MemoryAutoResume` has found, with a warning.

        Args:
            path: what `MemoryAutoResume.ckpt_path()` returned, or of a durable one.
            arguments: for the durable one.
            options: for the durable one.

        Raises:
            CheckpointError: the one in memory cannot be loaded, and there is no durable one.
        """
        return self.load_for(self.wrapped_checkpoint_io.load_checkpoint, path, *arguments, **options)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Removes a durable checkpoint; those in memory go when newer ones are there. Raises: ValueError for those."""
        if self.is_in_memory(path):
            raise ValueError(f"{path} is in memory: it is removed when a newer one is complete, or with the container")
        self.wrapped_checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """The trainer ends."""
        self.wrapped_checkpoint_io.teardown()

    def load_for(
        self, load_durable: Callable[..., dict[str, Any]], path: AnyPath, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        """As `load_checkpoint`, for strategies that load without a plugin: `load_durable` loads durable checkpoints."""
        if self.is_in_memory(path):
            try:
                return self._load(self._step_container(path))
            except CheckpointError as error:
                if self.fallback is None:
                    raise
                log.warning("%s cannot be loaded, so %s is: %s", path, self.fallback, error)
                path = self.fallback
        return load_durable(path, *arguments, **options)

    def _load(self, checkpoint_id: str) -> dict[str, Any]:
        self.start()
        strategy = self.trainer.strategy
        self._beside.notice(self.trainer)
        if layout_of(strategy) is Layout.SHARDED:
            prepare = partial(self._beside.take_sharded, self.trainer)
            return load_sharded(self.tier, checkpoint_id, strategy, allow_pickles=self.allow_pickles, prepare=prepare)
        checkpoint = put_together(self.tier.load(checkpoint_id), allow_pickles=self.allow_pickles)
        self._beside.take(self.trainer, checkpoint)
        return checkpoint

    def _step_container(self, path: AnyPath) -> str:
        found = CheckpointContainerId(_absolute(path))
        is_step = CheckpointContainerId.parse_version_container_step(found.name) is not None
        if not is_step or str(found.get_parent()) != str(self.container):
            raise ValueError(
                f"{path} lies in {self.container}, which is for checkpoints in memory alone and is removed when the "
                f"run ends: save there as step-<N>_ckpt, and durable checkpoints elsewhere"
            )
        return str(found)

    def _warn_of(self, skipped: tuple[str, ...]) -> None:
        if skipped and not self._has_warned:
            self._has_warned = True
            log.warning(
                "checkpoints in memory are saved without %s, which cannot be stored without a pickle; a run that goes "
                "on has its own. save_hyperparameters(ignore=[...]) leaves them out everywhere",
                ", ".join(skipped),
            )


def put_flags_back(plugin: MemoryCheckpointing) -> None:
    """Training begins, and all else is loaded: flags of the checkpoint that was loaded are put back, and told."""
    plugin._beside.put_flags(plugin.trainer)
