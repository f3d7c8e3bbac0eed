"""Wraps a trainer of Lightning for checkpoints in memory, and chooses the checkpoint with which a run goes on."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.adapters.lightning.callback import find_plugin
from torchelastic.adapters.lightning.memory_io import MemoryCheckpointing
from torchelastic.adapters.lightning.memory_strategies import layout_of
from torchelastic.adapters.memory_tier import AnyPath, container_of, takes_memory

log = logging.getLogger(__name__)

#: In the names that ModelCheckpoint gives.
_STEP_IN_NAME = re.compile(r"step=(\d+)")
#: The file of a sharded checkpoint that says how far it was.
_FILE_OF_SHARDED = "meta.pt"


def step_of_checkpoint(path: AnyPath) -> int | None:
    """The global step of a durable checkpoint of Lightning; None if it is not known.

    It is read from the checkpoint where that can be done without running a pickle and without reading tensors, else
    taken from a name such as `epoch=1-step=200.ckpt`.

    Args:
        path: a file, or the folder of a sharded checkpoint.
    """
    file = Path(str(path))
    if file.is_dir():
        file = file / _FILE_OF_SHARDED
    if file.is_file():
        try:
            content = torch.load(file, map_location="meta", mmap=True, weights_only=True)
            return int(content["global_step"])
        except (UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, OSError, EOFError):
            pass
    steps = _STEP_IN_NAME.findall(str(path))
    return int(steps[-1]) if steps else None


class MemoryAutoResume:
    """Chooses between the newest checkpoint in memory and the durable one: `trainer.fit(ckpt_path=it.ckpt_path())`.

    The one in memory is taken if its step is at least that of the durable one, or if the step of the durable one is not
    known (a name that Lightning resolves itself, such as "last"; an object store with names without `step=`).

    Made by `wrap_trainer_and_auto_resume`.

    Args:
        trainer: wrapped.
        checkpoint_io: its plugin.
        default: where the durable checkpoint is: a path or None, a function that returns one, or an object with
            `ckpt_path` (a method or a path) or, as NeMo's AutoResume, `get_trainer_ckpt_path`. Asked on all ranks.
        durable_step: the global step of the durable checkpoint at a path, or None; asked on rank 0.
    """

    def __init__(
        self,
        trainer: Any,
        checkpoint_io: MemoryCheckpointing,
        default: Any = None,
        durable_step: Callable[[AnyPath], int | None] = step_of_checkpoint,
    ) -> None:
        self.trainer = trainer
        self.checkpoint_io = checkpoint_io
        self.default = default
        self._durable_step = durable_step

    def ckpt_path(self) -> str | None:
        """The path of the checkpoint to go on from; None: there is none. All ranks call it.

        Missing parts of the one in memory are fetched from other hosts. Where it cannot be loaded after all, the plugin
        loads the durable one.

        Raises:
            RuntimeError: the job has several ranks, and they are only started by `fit`.
            TypeError: the trainer's strategy, or `default`, is of a kind that is not known here.
            CheckpointError: the container cannot be used.
        """
        return path_to_resume(self.trainer, self.checkpoint_io, self.default, self._durable_step)

    def setup(self, trainer: Any = None, model: Any = None) -> None:
        """As NeMo's AutoResume: sets the checkpoint to resume from. All ranks call it.

        Args:
            trainer: the wrapped one.
            model: given on to the `setup` of the durable one, if it has that.

        Raises:
            ValueError: it is another trainer.
        """
        if trainer is not None and trainer is not self.trainer:
            raise ValueError("this is not the trainer that was wrapped: give that one, or wrap this one too")
        if hasattr(self.default, "setup"):
            self.default.setup(self.trainer, model)
        path = self.ckpt_path()
        if path is not None:
            self.trainer.ckpt_path = path


def path_to_resume(
    trainer: Any, checkpoint_io: MemoryCheckpointing, default: Any, step_of: Callable[[AnyPath], int | None]
) -> str | None:
    """What both `MemoryAutoResume` choose by, Lightning's and NeMo's: see `MemoryAutoResume.ckpt_path`."""
    join_process_group(trainer)
    checkpoint_io.start()
    tier = checkpoint_io.tier
    durable = durable_path(default)
    checkpoint_io.fallback = durable
    newest, step = tier.newest() or (None, None)
    durable_step = None
    if trainer.global_rank == 0 and durable is not None and step is not None:
        durable_step = step_of(durable)
    is_memory = tier.ranks.all_gather("choose a checkpoint", takes_memory(step, durable_step))[0]
    if newest is None or not is_memory:
        log.info("going on from the durable checkpoint: %s", durable)
        return None if durable is None else str(durable)
    log.info("going on from the checkpoint in memory %s; the durable one is %s", newest, durable)
    return str(newest)


def durable_path(default: Any) -> AnyPath | None:
    """The path that a default of any kind gives; None if it has none.

    Raises:
        TypeError: it is of another kind.
    """
    if default is None or isinstance(default, str | os.PathLike):
        return default
    for name in ("get_trainer_ckpt_path", "ckpt_path"):
        if hasattr(default, name):
            found = getattr(default, name)
            return _as_path(found() if callable(found) else found)
    if callable(default):
        return _as_path(default())
    raise TypeError(
        f"default_auto_resume is a {type(default).__name__}: give a path, a function that returns one, or an object "
        "with ckpt_path or get_trainer_ckpt_path"
    )


def _as_path(found: Any) -> AnyPath | None:
    return found if found is None or isinstance(found, os.PathLike) else str(found)


def join_process_group(trainer: Any) -> None:
    """Has this rank join the job's process group, if there is one to come and it has not done so.

    Raises:
        RuntimeError: the ranks are only started by `fit`.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or dist.is_initialized():
        return
    environment = getattr(strategy, "cluster_environment", None)
    if environment is not None and not environment.creates_processes_externally:
        raise RuntimeError(
            "the other ranks are only started by fit, so they cannot look for checkpoints yet: start the script with "
            "`torchelastic run` or torchrun"
        )
    # ModelParallelStrategy.setup_environment wants a module
    join = getattr(strategy, "_setup_distributed", None) if strategy.lightning_module is None else None
    (join or strategy.setup_environment)()


def wrap_trainer(
    checkpoint_io_class: type[MemoryCheckpointing],
    trainer: Any,
    container: AnyPath | None,
    default_auto_resume: Any,
    durable_step: Callable[[AnyPath], int | None] = step_of_checkpoint,
    **options: Any,
) -> MemoryAutoResume:
    """See `torchelastic.adapters.lightning.wrap_trainer_and_auto_resume`; `options` are for the plugin."""
    strategy = trainer.strategy
    layout_of(strategy)
    if any(one.__name__ == "_MultiProcessingLauncher" for one in type(strategy.launcher).__mro__):
        raise ValueError(
            f"{type(strategy).__name__} starts its ranks as copies of this process, which cannot share checkpoints in "
            "memory: start the script with `torchelastic run` or torchrun, and use strategy='ddp'"
        )
    plugin = find_plugin(trainer, MemoryCheckpointing)
    if plugin is None:
        plugin = checkpoint_io_class(container, strategy.checkpoint_io, trainer, **options)
        strategy.checkpoint_io = plugin
        strategy.save_checkpoint = partial(_save_for, plugin, strategy.save_checkpoint)
        strategy.load_checkpoint = partial(plugin.load_for, strategy.load_checkpoint)
    elif str(plugin.container) != str(container_of(container)):
        raise ValueError(f"the trainer is wrapped already, with {plugin.container}: wrap it once, or with the same")
    return MemoryAutoResume(trainer, plugin, default_auto_resume, durable_step)


def _save_for(
    plugin: MemoryCheckpointing,
    save_durable: Callable[..., None],
    checkpoint: dict[str, Any],
    filepath: AnyPath,
    *arguments: Any,
    **options: Any,
) -> None:
    """In place of the strategy's `save_checkpoint`, which saves on rank 0 alone or without the plugin."""
    if plugin.is_in_memory(filepath):
        plugin.save_checkpoint(checkpoint, filepath)
    else:
        save_durable(checkpoint, filepath, *arguments, **options)
