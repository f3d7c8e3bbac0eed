"""Local checkpoints and checkpoints in memory for Lightning; see docs/lightning.md.

Works with `lightning` and with `pytorch_lightning`. The classes are derived from those of the library that the program
has imported (`lightning` if it has imported both); `classes_for` chooses by name. Neither is imported before a name is
used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections import UserString
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torchelastic.adapters.lightning.local import LOCAL_CHECKPOINT, LOCAL_CKPT_OPTS_KEY

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import DDPStrategy

    from torchelastic.adapters.lightning.elastic_strategy import ElasticDDP
    from torchelastic.adapters.lightning.local import HierarchicalCheckpointing, LocalCheckpointing
    from torchelastic.adapters.lightning.memory import MemorySaving
    from torchelastic.adapters.lightning.memory_io import MemoryCheckpointing
    from torchelastic.adapters.lightning.memory_resume import MemoryAutoResume

    class LocalCheckpointCallback(LocalCheckpointing, Callback):
        """See `LocalCheckpointing`."""

    class HierarchicalCheckpointIO(HierarchicalCheckpointing, CheckpointIO):
        """See `HierarchicalCheckpointing`."""

    class MemoryCheckpointCallback(MemorySaving, Callback):
        """See `MemorySaving`."""

    class ElasticDDPStrategy(ElasticDDP, DDPStrategy):
        """See `ElasticDDP`."""

    class MemoryCheckpointIO(MemoryCheckpointing, CheckpointIO):
        """See `MemoryCheckpointing`."""


__all__ = [
    "LOCAL_CHECKPOINT",
    "LOCAL_CKPT_OPTS_KEY",
    "ElasticDDPStrategy",
    "HierarchicalCheckpointIO",
    "LocalCheckpointCallback",
    "MemoryAutoResume",
    "MemoryCheckpointCallback",
    "MemoryCheckpointIO",
    "classes_for",
    "wrap_trainer_and_auto_resume",
]

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")

#: What a class is made of: our part, and where; Lightning's part, and where.
_CLASSES = {
    "LocalCheckpointCallback": ("LocalCheckpointing", "local", "Callback", "callbacks"),
    "HierarchicalCheckpointIO": ("HierarchicalCheckpointing", "local", "CheckpointIO", "plugins.io"),
    "MemoryCheckpointCallback": ("MemorySaving", "memory", "Callback", "callbacks"),
    "MemoryCheckpointIO": ("MemoryCheckpointing", "memory_io", "CheckpointIO", "plugins.io"),
    "ElasticDDPStrategy": ("ElasticDDP", "elastic_strategy", "DDPStrategy", "strategies"),
}


@cache
def classes_for(library: str) -> dict[str, Any]:
    """The classes of this module, derived from those of one library.

    Args:
        library: "lightning.pytorch" or "pytorch_lightning".

    Raises:
        ValueError: it is another one.
        ImportError: it is not installed.
    """
    if library not in _LIBRARIES:
        raise ValueError(f"library is {library!r}: give one of {', '.join(map(repr, _LIBRARIES))}")
    classes = {}
    for name, (part, module, base, base_module) in _CLASSES.items():
        bases = (
            getattr(importlib.import_module(f"torchelastic.adapters.lightning.{module}"), part),
            getattr(importlib.import_module(f"{library}.{base_module}"), base),
        )
        classes[name] = type(name, bases, {"__module__": __name__, "__doc__": bases[0].__doc__})
    return classes


def wrap_trainer_and_auto_resume(
    trainer: Any,
    flashpoint_base_container: str | os.PathLike[str] | UserString | None,
    async_save: bool,
    default_auto_resume: Any = None,
    always_save_context: bool = False,  # noqa: ARG001 - of NeMo
    write_thread_count: int = 1,
    initial_write_buffer_size_bytes: int = 16 * 2**30,  # noqa: ARG001 - memory is taken as it is needed
    use_optimized_save: bool = True,  # noqa: ARG001 - there is one format
    use_cached_ckpt_structure: bool = False,  # noqa: ARG001 - of Megatron
    use_fully_parallel_wrapper: bool = True,  # noqa: ARG001 - of Megatron
    *,
    durable_step: Callable[[Any], int | None] | None = None,
    allow_pickles: bool = False,
) -> MemoryAutoResume:
    """Has a trainer save checkpoints in memory beside its durable ones, and go on from whichever is newer.

    Paths in the container go to memory; what has another path goes to the trainer's own checkpoint plugin and
    strategy, as before. Call it on all ranks, before `fit`; once more with the same container changes nothing but the
    default. Nothing is opened yet. `MemoryCheckpointCallback`, one of the trainer's callbacks, says when to save.

    Args:
        trainer: of `lightning` or `pytorch_lightning`.
        flashpoint_base_container: an absolute path on tmpfs for this job alone, the same after a restart; durable
            checkpoints have to lie elsewhere. None: derived from the run id, see `job_container`.
        async_save: write in the background.
        default_auto_resume: where the durable checkpoint is: a path, a function that returns one or None, or an object
            with `ckpt_path` or NeMo's `get_trainer_ckpt_path`.
        always_save_context: for NeMo; changes nothing here.
        write_thread_count: threads per rank that write.
        initial_write_buffer_size_bytes: changes nothing: memory is taken as it is needed.
        use_optimized_save: changes nothing: there is one format.
        use_cached_ckpt_structure: for Megatron; changes nothing here.
        use_fully_parallel_wrapper: for Megatron; changes nothing here.
        durable_step: the global step of the durable checkpoint at a path, None if it is not known; the default looks
            into the file and at its name, see `step_of_checkpoint`.
        allow_pickles: store objects that are neither plain values nor tensors as pickles, and run them when loading.

    Returns:
        What chooses: `trainer.fit(module, ckpt_path=auto_resume.ckpt_path())`.

    Raises:
        TypeError: the trainer's strategy saves checkpoints in a way of its own (DeepSpeed, XLA).
        ValueError: the strategy starts its ranks as copies of this process, or gathers what is sharded; the container
            is no absolute path, or another one than before.
    """
    from torchelastic.adapters.lightning.memory_resume import step_of_checkpoint, wrap_trainer

    return wrap_trainer(
        classes_for(_library_of(trainer))["MemoryCheckpointIO"],
        trainer,
        flashpoint_base_container,
        default_auto_resume,
        step_of_checkpoint if durable_step is None else durable_step,
        async_save=async_save,
        thread_count=write_thread_count,
        allow_pickles=allow_pickles,
    )


def _library_of(trainer: Any) -> str:
    for one in type(trainer).__mro__:
        for library in _LIBRARIES:
            if one.__module__.startswith(f"{library}."):
                return library
    raise TypeError(f"the trainer is a {type(trainer).__name__}: give a Trainer of lightning or pytorch_lightning")


def _library_in_use() -> str:
    loaded = [library for library in _LIBRARIES if library in sys.modules]
    installed = [library for library in _LIBRARIES if importlib.util.find_spec(library.partition(".")[0]) is not None]
    if not installed:
        raise ImportError("neither lightning nor pytorch_lightning is installed: pip install 'torchelastic[lightning]'")
    return (loaded or installed)[0]


def __getattr__(name: str) -> object:
    if name == "MemoryAutoResume":
        return importlib.import_module("torchelastic.adapters.lightning.memory_resume").MemoryAutoResume
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes_for(_library_in_use())[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
