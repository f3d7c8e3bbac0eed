"""Checkpoints in memory for NeMo 2.0; see docs/nemo.md.

    callbacks.append(MemoryCheckpointCallback(container, every_n_steps=10, skip_every_n_steps=500))
    ...
    trainer.strategy.setup_environment()
    resume = wrap_trainer_and_auto_resume(trainer, container, async_save=True, default_auto_resume=resume)

Needs the packages nemo_toolkit (2.x) and megatron-core, which want an environment of their own.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

try:
    import nemo.lightning as nl
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizerCallback
except ImportError as error:
    raise ImportError(
        "torchelastic.adapters.nemo needs NeMo 2.0, which cannot be imported: install torchelastic with "
        f"nemo_toolkit[lightning] 2.7 and megatron-core 0.15.3 in an environment of its own ({error})"
    ) from error

from torchelastic.adapters.lightning import classes_for
from torchelastic.adapters.lightning import wrap_trainer_and_auto_resume as wrap_for_lightning
from torchelastic.adapters.lightning.callback import find_plugin
from torchelastic.adapters.lightning.memory import MemorySaving
from torchelastic.adapters.lightning.memory_io import MemoryCheckpointing
from torchelastic.adapters.memory_tier import AnyPath, container_of
from torchelastic.adapters.nemo.io import MemoryAsyncFinalizableCheckpointIO, MemoryCheckpointIO
from torchelastic.adapters.nemo.resume import MemoryAutoResume

if TYPE_CHECKING:
    from torchelastic.adapters.lightning import MemoryCheckpointCallback
else:
    MemoryCheckpointCallback = classes_for("lightning.pytorch")["MemoryCheckpointCallback"]  # as NeMo imports it

__all__ = [
    "MemoryAsyncFinalizableCheckpointIO",
    "MemoryAutoResume",
    "MemoryCheckpointCallback",
    "MemoryCheckpointIO",
    "wrap_trainer_and_auto_resume",
]

log = logging.getLogger(__name__)


def wrap_trainer_and_auto_resume(
    trainer: Any,
    flashpoint_base_container: AnyPath | None,
    async_save: bool,
    default_auto_resume: Any = None,
    always_save_context: bool = False,
    write_thread_count: int = 1,
    initial_write_buffer_size_bytes: int = 16 * 2**30,  # noqa: ARG001 - memory is taken as it is needed
    use_optimized_save: bool = True,  # noqa: ARG001 - there is one format
    use_cached_ckpt_structure: bool = False,
    use_fully_parallel_wrapper: bool = True,
) -> Any:
    """Has a trainer of NeMo save in memory when its `MemoryCheckpointCallback` says so, and go on from there.

    Called on all ranks, before the trainer fits. It may be called again, and does nothing if the trainer has no
    `MemoryCheckpointCallback`. With strategies other than MegatronStrategy it does what the wrapper in
    `torchelastic.adapters.lightning` does. Nothing is opened before `setup` of what it returns.

    Args:
        trainer: of `nemo.lightning`.
        flashpoint_base_container: of this job: that of the callback. None: derived from the run id.
        async_save: write in the background.
        default_auto_resume: finds checkpoints in long-term storage; None: there is none.
        always_save_context: save NeMo's context of model and tokenizer with each checkpoint in memory.
        write_thread_count: for writing.
        initial_write_buffer_size_bytes: changes nothing: memory is taken as it is needed.
        use_optimized_save: changes nothing: there is one format.
        use_cached_ckpt_structure: with MegatronStrategy: plan anew only when the structure of the state has changed.
        use_fully_parallel_wrapper: with MegatronStrategy: spread what data-parallel ranks have alike over them.

    Returns:
        What to give `llm.train` as `resume`: a `MemoryAutoResume`, or `default_auto_resume` if there is no callback.

    Raises:
        ValueError: the trainer was wrapped with another container, or saves in the format "fsdp_dtensor"; the container
            is no absolute path.
        TypeError: the strategy is one that saves in a way of its own.
    """
    if not any(isinstance(callback, MemorySaving) and callback.enabled for callback in trainer.callbacks):
        log.info("the trainer has no MemoryCheckpointCallback: nothing is saved in memory")
        return default_auto_resume
    if not isinstance(trainer.strategy, nl.MegatronStrategy):
        wrap_for_lightning(
            trainer,
            flashpoint_base_container,
            async_save,
            write_thread_count=write_thread_count,
        )
        return _auto_resume(trainer, find_plugin(trainer, MemoryCheckpointing), default_auto_resume)
    plugin = find_plugin(trainer, MemoryCheckpointing)
    if plugin is None:
        plugin = MemoryCheckpointIO(
            flashpoint_base_container,
            _checked(trainer.strategy).checkpoint_io,
            trainer,
            async_save,
            always_save_context,
            use_fully_parallel_wrapper=use_fully_parallel_wrapper,
            use_cached_ckpt_structure=use_cached_ckpt_structure,
            thread_count=write_thread_count,
        )
        trainer.strategy.checkpoint_io = MemoryAsyncFinalizableCheckpointIO(plugin)
        if async_save and not any(isinstance(callback, AsyncFinalizerCallback) for callback in trainer.callbacks):
            trainer.callbacks.append(AsyncFinalizerCallback())
    elif str(plugin.container) != str(container_of(flashpoint_base_container)):
        raise ValueError(f"the trainer is wrapped already, with {plugin.container}: wrap it once, or with the same")
    return _auto_resume(trainer, plugin, default_auto_resume)


def _checked(strategy: Any) -> Any:
    if strategy.save_ckpt_format == "fsdp_dtensor":
        raise ValueError(
            "save_ckpt_format is 'fsdp_dtensor', which MegatronStrategy saves without a plugin: checkpoints in memory "
            "need 'torch_dist'"
        )
    return strategy


def _auto_resume(trainer: Any, plugin: Any, default: Any) -> MemoryAutoResume:
    if isinstance(default, MemoryAutoResume):
        return default
    values = {} if default is None else {one.name: getattr(default, one.name) for one in fields(nl.AutoResume)}
    is_derived = default is not None and type(default) is not nl.AutoResume
    return MemoryAutoResume(trainer=trainer, checkpoint_io=plugin, default=default if is_derived else None, **values)
