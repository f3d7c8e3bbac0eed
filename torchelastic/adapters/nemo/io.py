"""How NeMo's MegatronStrategy saves into memory and loads from it; all other checkpoints are left to its own plugin."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.parallel_state import get_data_parallel_group
from nemo.lightning.io.pl import TrainerContext
from nemo.utils.callbacks.dist_ckpt_io import AsyncCompatibleCheckpointIO, AsyncFinalizableCheckpointIO
from nemo.utils.model_utils import unwrap_model

from torchelastic.adapters.lightning.memory_io import MemoryCheckpointing
from torchelastic.adapters.megatron import (
    MegatronAsyncSaveStrategy,
    MegatronCommonLoadStrategy,
    MegatronLoadStrategy,
    save_local_aware_megatron_checkpoint,
)
from torchelastic.adapters.memory_tier import AnyPath, StorageTier
from torchelastic.adapters.values import CONTEXT_FILE, packed
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncRequest
from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError

log = logging.getLogger(__name__)


class MegatronTier(StorageTier):
    """The memory tier with Megatron's strategies in place of `save` and `load`; the queue of what is being written."""

    save_strategy: Any = None
    load_strategy: Any = None
    queue: AsyncCallsQueue | None = None
    #: Plan anew only when the structure of the state has changed.
    use_cached_ckpt_structure = False

    def start(self) -> None:
        """Opens the tier, if it is not open. Called on all ranks, when the process group is there."""
        if self.queue is not None:
            return
        super().start()
        opened = self._opened()
        self.save_strategy = MegatronAsyncSaveStrategy(
            opened.writer, use_cached_ckpt_structure=self.use_cached_ckpt_structure, timeout_s=self._timeout_s
        )
        self.load_strategy = MegatronLoadStrategy(opened.replication, opened.loader)
        self.load_strategy.register()  # some functions of Megatron's are given no strategy
        # a thread: the state was copied, and Megatron's own queue would fork the trainer
        self.queue = AsyncCallsQueue(worker="thread", process_group=opened.group, timeout_s=self._timeout_s)

    def wait(self) -> None:
        """Waits for the save that is being written, if there is one, and commits it. Called on all ranks."""
        if self.queue is not None:
            self.queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        """As `StorageTier.close`."""
        queue, self.queue = self.queue, None
        if queue is not None:
            queue.close(abort=True)
        super().close()


class MemoryCheckpointIO(MemoryCheckpointing, AsyncCompatibleCheckpointIO):  # type: ignore[misc] # NeMo has no types
    """Saves and loads the checkpoints of a MegatronStrategy in memory; those of other paths go to another plugin.

    A path is in memory if it lies in the container, by the parts of the path. Methods that are given one are called on
    all ranks, from the thread that trains. `wrap_trainer_and_auto_resume` makes one.

    A checkpoint in memory that cannot be loaded on some rank is skipped on all of them: the one in long-term
    storage is loaded instead, if `MemoryAutoResume` has found one.

    Args:
        flashpoint_base_path: the container of this job.
        alt_checkpoint_io: for all other paths.
        trainer: whose checkpoints these are.
        async_save: `save_checkpoint` returns what remains to be done in the background; else it does it.
        always_save_context: save the context (what NeMo makes model and tokenizer from) with each checkpoint.
        use_fully_parallel_wrapper: spread the work on what several data-parallel ranks have alike over these ranks.
        use_cached_ckpt_structure: check and plan anew only when the structure of the state has changed.
        tier_options: see `StorageTier`.

    Raises:
        ValueError: the container is no absolute path.
    """

    tier: MegatronTier

    def __init__(
        self,
        flashpoint_base_path: AnyPath | None,
        alt_checkpoint_io: Any,
        trainer: Any,
        async_save: bool = True,
        always_save_context: bool = False,
        *,
        use_fully_parallel_wrapper: bool = True,
        use_cached_ckpt_structure: bool = False,
        **tier_options: Any,
    ) -> None:
        super().__init__(flashpoint_base_path, alt_checkpoint_io, trainer, async_save)
        self.tier = MegatronTier(self.container, async_save=async_save, **tier_options)
        self.tier.use_cached_ckpt_structure = use_cached_ckpt_structure
        self.async_save = async_save
        self._always_save_context = always_save_context
        self._is_fully_parallel, self._is_cached = use_fully_parallel_wrapper, use_cached_ckpt_structure
        self._is_validated = False
        self._skipped: set[str] = set()

    def start(self) -> None:
        """Opens the tier, if it is not open. All ranks call it, when the process group is there."""
        self.tier.start()

    # --- saving -------------------------------------------------------------------------------------------------------

    @property
    def save_sharded_strategy(self) -> Any:
        """What saves the tensors. Megatron's process groups have to be there."""
        if not self._is_fully_parallel:
            return self.tier.save_strategy
        # without its cache: it knows no structure but the first, and would leave out what is new later
        return FullyParallelSaveStrategyWrapper(
            self.tier.save_strategy, get_data_parallel_group(with_context_parallel=True), do_cache_distribution=False
        )

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> Any:
        """Saves. Tensors may be changed as soon as this returns.

        Args:
            checkpoint: of Lightning (`dump_checkpoint`), or of MegatronStrategy, which calls this again.
            path: in memory: `step-<N>_ckpt` in the container.
            storage_options: of MegatronStrategy; its `content_metadata` is saved too.

        Returns:
            With `async_save`, a request of Megatron's if MegatronStrategy's checkpoint was given. For other paths, what
            the other plugin returns.

        Raises:
            ValueError: the path lies in the container and is no step's; or the model has state of Model Optimizer.
            Exception: the state cannot be saved. A save for which there is no memory is left out with a warning.
        """
        if not self.is_in_memory(path):
            return self.wrapped_checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        path = self._step_container(path)
        self.start()
        if "sharded_state_dict" not in checkpoint:
            _require_no_modelopt(self.trainer.strategy)
            return self.trainer.strategy.save_checkpoint(checkpoint, path)
        self.tier.wait()
        if self._always_save_context and dist.get_rank() == 0:
            self._attach_context()
        is_first, self._is_validated = not self._is_validated, True
        return save_local_aware_megatron_checkpoint(
            checkpoint,
            path,
            self.save_sharded_strategy,
            self.async_save,
            validate_access_integrity=is_first or not self._is_cached,
            content_metadata=(storage_options or {}).get("content_metadata"),
        )

    def _attach_context(self) -> None:
        with tempfile.TemporaryDirectory(prefix="torchelastic-context-") as folder:
            try:
                TrainerContext.from_trainer(self.trainer).io_dump(Path(folder), yaml_attrs=["model"])
                self.tier.save_strategy.attach(CONTEXT_FILE, packed(Path(folder)))
            except Exception:  # what a user's class raises is no reason to lose the checkpoint
                log.warning("the context of this run is not saved with its checkpoint in memory", exc_info=True)

    # --- loading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: AnyPath, sharded_state_dict: Any = None, map_location: Any = None, strict: Any = None
    ) -> Any:
        """Loads what is at a path; if it is in memory and fails on some rank, the one in long-term storage.

        Args:
            path: of the checkpoint.
            sharded_state_dict: what to load, of this rank.
            map_location: for other plugins; None for a checkpoint in memory.
            strict: as for NeMo's MegatronCheckpointIO: a bool, or a `StrictHandling` of Megatron's.

        Raises:
            ValueError: `map_location` is given for a checkpoint in memory.
            CheckpointError: the one in memory cannot be loaded, and there is none in long-term storage.
        """
        if not self.is_in_memory(path):
            return self.wrapped_checkpoint_io.load_checkpoint(
                path, sharded_state_dict=sharded_state_dict, map_location=map_location, strict=strict
            )
        if map_location is not None:
            raise ValueError("map_location is given: leave it out, a checkpoint in memory is loaded into place")
        loaded = self._unless_it_fails(str(path), lambda: self._read(str(path), sharded_state_dict, strict))
        if loaded is not None:
            return loaded
        long_term = self._long_term(path)
        self.trainer.ckpt_path = long_term  # what NeMo must not remove while it trains on from there
        return self.trainer.strategy.load_checkpoint(long_term)  # whose content metadata may be others

    def load_content_metadata(self, path: AnyPath | None = None, preloaded_state_dict: Any = None) -> Any:
        """The content metadata given to `save_checkpoint`, to load the same kind of state; as NeMo's plugin.

        Raises:
            CheckpointError: as `load_checkpoint`.
        """
        of_others = _innermost(self.wrapped_checkpoint_io).load_content_metadata
        if path is None or not self.is_in_memory(path):
            return of_others(path, preloaded_state_dict)
        # before any tensor is loaded: a host without common state is found out while all ranks are still together
        common = self._unless_it_fails(str(path), lambda: MegatronCommonLoadStrategy().load_common(str(path)))
        return of_others(self._long_term(path)) if common is None else of_others(preloaded_state_dict=common)

    def _read(self, path: str, sharded_state_dict: Any, strict: Any) -> Any:
        self.start()
        strategy = self.tier.load_strategy
        if self._is_fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy, get_data_parallel_group(with_context_parallel=True))
        if strict is False:
            sharded_state_dict = _innermost(self.wrapped_checkpoint_io).adjust_non_strict_load(path, sharded_state_dict)
            strict = StrictHandling.LOG_ALL
        return dist_checkpointing.load(
            sharded_state_dict,
            path,
            sharded_strategy=strategy,
            common_strategy=MegatronCommonLoadStrategy(),
            strict=strict if isinstance(strict, StrictHandling) else StrictHandling.ASSUME_OK_UNEXPECTED,
        )

    def _unless_it_fails(self, path: str, read: Callable[[], Any]) -> Any:
        """What was read; None on all ranks if that fails on one of them, now or at another time. A collective."""
        if path in self._skipped:
            return None
        self.start()
        try:
            return self.tier.own_on_all(f"read {Path(path).name}", read)
        except OutOfStepError:
            raise
        except CheckpointError as error:
            self._skipped.add(path)
            log.warning("the checkpoint in memory %s is skipped: %s", path, error)
            return None

    def _long_term(self, path: AnyPath) -> AnyPath:
        if self.fallback is None:
            raise CheckpointError(
                f"{path} cannot be loaded (the log says why), and there is no checkpoint in long-term storage: remove "
                f"{self.container} on all hosts to begin anew"
            )
        log.warning("loading %s instead", self.fallback)
        return self.fallback


class MemoryAsyncFinalizableCheckpointIO(AsyncFinalizableCheckpointIO):  # type: ignore[misc] # NeMo has no types
    """What MegatronStrategy is given as its plugin: runs the saves of a `MemoryCheckpointIO` in the background.

    They have a queue of their own, so that they wait for no long-term save; that one goes on as it did. Called on all
    ranks, as `MemoryCheckpointIO`.

    Args:
        checkpoint_io: what saves.
    """

    def __init__(self, checkpoint_io: MemoryCheckpointIO) -> None:
        super().__init__(checkpoint_io)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Saves as `MemoryCheckpointIO`, which see. A `finalize_fn` in the storage options is called at the end."""
        memory: MemoryCheckpointIO = self.checkpoint_io
        if not memory.is_in_memory(path):
            memory.wrapped_checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            return
        options = dict(storage_options or {})
        finalize_fn = options.pop("finalize_fn", None)
        request = memory.save_checkpoint(checkpoint, path, options)
        if request is not None and memory.tier.queue is not None:
            finalize_fns = [*request.finalize_fns, *([finalize_fn] if finalize_fn is not None else [])]
            memory.tier.queue.schedule_async_request(
                AsyncRequest(request.async_fn, request.async_fn_args, finalize_fns, request.async_fn_kwargs)
            )
        elif finalize_fn is not None:
            finalize_fn()

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Finalises what all ranks have written, in memory and in long-term storage.

        Args:
            blocking: wait for all of it.

        Returns:
            Whether something was finalised.
        """
        queue = self.checkpoint_io.tier.queue
        finalized = bool(queue is not None and queue.maybe_finalize_async_calls(blocking))
        others = self.checkpoint_io.wrapped_checkpoint_io
        if hasattr(others, "maybe_finalize_save_checkpoint"):
            finalized = bool(others.maybe_finalize_save_checkpoint(blocking)) or finalized
        return finalized

    def teardown(self) -> None:
        """The trainer ends. The tier is closed by the callback, later and only if training has not failed."""
        self.checkpoint_io.wrapped_checkpoint_io.teardown()


def _require_no_modelopt(strategy: Any) -> None:
    manager = import_module("modelopt.torch.opt").ModeloptStateManager  # MegatronStrategy has to import it too
    if manager.is_converted(unwrap_model(strategy.megatron_parallel)):
        raise ValueError(
            "the model was converted by Model Optimizer, whose state is not saved in memory: leave "
            "MemoryCheckpointCallback out of this run, or give it enabled=False"
        )


def _innermost(plugin: Any) -> Any:
    while hasattr(plugin, "checkpoint_io"):
        plugin = plugin.checkpoint_io
    return plugin
