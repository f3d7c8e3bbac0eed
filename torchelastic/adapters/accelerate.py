"""Accelerate's `save_state` and `load_state`, to and from memory; see docs/transformers.md."""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import Any

try:
    import accelerate  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError(f"{error}; accelerate is needed here: pip install 'torchelastic[transformers]'") from error

from torchelastic.adapters.accelerate_loaders import go_on, is_stateful, position_of, set_position
from torchelastic.adapters.accelerate_parts import Prepared
from torchelastic.adapters.hugging_face.rank_state import (
    LEADING,
    REPLICATED,
    RankState,
    belongs_to,
    own_part,
    part_from,
    require_unsharded,
    save_step,
    set_rng_state,
    tensors_of,
)
from torchelastic.adapters.memory_tier import TIMEOUT_S, StorageTier
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId
from torchelastic.inventory.generators import draw_from

__all__ = ["MemoryCheckpointer"]

log = logging.getLogger(__name__)


class MemoryCheckpointer:
    """Saves what `accelerator.save_state` saves to memory, and loads it as `load_state` does.

    That is: prepared models, optimizers, schedulers and dataloaders, the gradient scaler, objects given to
    `register_for_checkpointing`, the accelerator's step, and each rank's random numbers. Besides: flags, versions and
    all buffers of models, and the gradients of an accumulation that is under way. Models and optimizers are
    written once, spread over the ranks. For one process and for DDP. Hooks of `register_save_state_pre_hook` and
    `register_load_state_pre_hook` are not called: they write and read files.

    All ranks call all methods, from the main thread. As a context manager it closes itself.

    Args:
        accelerator: may prepare objects until the first save or load.
        checkpoint_base_container: where this job's checkpoints lie on this host; None: `job_container()`.
        async_save: `save` returns as soon as the values have been copied.
        timeout_s: how long a save may take, and how long ranks wait for each other.

    Attributes:
        extra: what was given to the `save` that was loaded.

    Raises:
        TypeError: it is no Accelerator.
        ValueError: it runs with FSDP, DeepSpeed, Megatron-LM or XLA; or the container is no absolute path.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        checkpoint_base_container: CheckpointContainerId | str | os.PathLike[str] | None = None,
        *,
        async_save: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not isinstance(accelerator, accelerate.Accelerator):
            raise TypeError(f"the accelerator is a {type(accelerator).__name__}: give the accelerate.Accelerator")
        require_unsharded("MemoryCheckpointer", str(accelerator.distributed_type.value))
        self._accelerator = accelerator
        self._prepared = Prepared(accelerator)
        self._tier = StorageTier(checkpoint_base_container, async_save=async_save, timeout_s=timeout_s)
        self.extra: dict[str, Any] = {}
        self._random_numbers: dict[str, Any] | None = None

    def save(self, step: int, **extra: Any) -> None:
        """Saves, once the save before is through. One that fails, or has no memory, is logged; training goes on.

        Args:
            step: of the checkpoint, 0 or more.
            extra: plain values and tensors to keep with it (those of rank 0), such as the epoch; see `extra`.

        Raises:
            TypeError: something to be saved is neither a plain value nor a tensor; names it.
            CheckpointError: the save before is still not through after `timeout_s`.
        """
        save_step(self._tier, step, lambda: tensors_of(self._state(extra), self._tier.ranks.rank))

    def load(self) -> int | None:
        """Loads the newest complete checkpoint into what the accelerator has prepared; call it after `prepare`.

        A job of another number of ranks may load it; ranks above those that saved draw what depends on the step and on
        their number.

        Returns:
            Its step; None if there is none, and then nothing has changed.

        Raises:
            CheckpointError: it cannot be read, or was saved with other numbers of models, optimizers and so on.
        """
        self._prepared.notice()
        self._tier.start()
        newest = self._tier.newest()
        if newest is None:
            return None
        memory, step = newest
        own = own_part(self._tier.ranks.rank)
        tensors = self._tier.load(
            str(memory), lambda name: any(belongs_to(name, part) for part in (REPLICATED, LEADING, own))
        )
        saved = {**part_from(tensors, REPLICATED), **part_from(tensors, LEADING)}
        mine = part_from(tensors, own) if any(belongs_to(name, own) for name in tensors) else {}
        self._require_fitting(saved, mine)
        windows = self._windows(str(memory), saved, mine)
        notes = self._prepared.apply(saved, mine)
        for dataloader, position in zip(self._accelerator._dataloaders, saved["dataloaders"], strict=True):
            set_position(dataloader, position)
        self._prepared.put_gradients(windows)
        for note in notes if self._tier.ranks.rank == 0 else ():
            log.warning("loaded %s: %s", memory, note)
        if mine:
            self._apply_own(mine)
        else:
            draw_from(f"{step}".encode(), self._tier.ranks.rank)
            log.info("%s was saved by fewer ranks: rank %d draws from its number", memory, self._tier.ranks.rank)
        self.extra = saved["extra"]
        return step

    def restore_random_numbers(self) -> None:
        """Sets the random numbers of this rank once more as `load` did; nothing if it has loaded none.

        A dataloader draws from them when it is iterated. So a loop that goes on in the middle of an epoch calls this
        when it has its first batch, to continue as if it had not been interrupted.
        """
        if self._random_numbers is not None:
            set_rng_state(self._random_numbers)

    def wait(self) -> None:
        """Waits for the save that is under way. Raises: CheckpointError if it is not through after `timeout_s`."""
        self._tier.wait()

    def remove(self) -> None:
        """Removes the container of the job, with all in it: training is done, and its result is stored elsewhere."""
        self._tier.start()
        self._tier.remove(self._accelerator.local_process_index)

    def close(self) -> None:
        """Waits for the save that is under way, and ends the background work; the checkpoint stays."""
        self._tier.end()

    def __enter__(self) -> MemoryCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else other ranks may be gone, and nobody may be waited for
            self.close()

    def _state(self, extra: dict[str, Any]) -> RankState:
        parts, dataloaders = self._prepared.parts(extra), self._accelerator._dataloaders
        states = [one.state_dict() if is_stateful(one) else None for one in dataloaders]
        return RankState(
            parts.replicated,
            {**parts.leading, "dataloaders": [position_of(dataloader) for dataloader in dataloaders]},
            {**parts.own, "dataloaders": states},
        )

    def _require_fitting(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        if "named_optimizers" not in saved and "optimizers" not in saved:
            raise CheckpointError(
                f"the checkpoint in {self._tier.container} was not saved by a MemoryCheckpointer: load it with what "
                "saved it, or give this job a container of its own"
            )
        faults = self._tier.ranks.run_on_all("compare with the checkpoint", lambda: self._prepared.faults(saved, own))
        found = next(filter(None, faults), [])
        if found:
            raise CheckpointError(
                f"the checkpoint in {self._tier.container} does not fit: {'; '.join(found)}. Nothing was loaded; "
                "prepare and register the same as when it was saved, before load()"
            )

    def _windows(self, memory: str, saved: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
        """The gradients of an accumulation that was under way: this rank's, or all if there were other ranks."""
        ranks = saved.get("ranks", self._tier.ranks.world_size)
        if ranks == self._tier.ranks.world_size:
            return [own["gradients"]] if "gradients" in own else []
        if not saved.get("is_accumulating"):
            return []
        parts = [own_part(rank) for rank in range(ranks)]
        tensors = self._tier.load(memory, lambda name: any(belongs_to(name, part) for part in parts))
        return [part_from(tensors, part).get("gradients", {}) for part in parts]

    def _apply_own(self, own: Any) -> None:
        optimizers = [getattr(one, "optimizer", one) for one in self._accelerator._optimizers]
        for dataloader, state in zip(self._accelerator._dataloaders, own["dataloaders"], strict=True):
            if state is not None and is_stateful(dataloader):
                go_on(dataloader, state, optimizers)
        self._random_numbers = own["rng"]
        self.restore_random_numbers()
