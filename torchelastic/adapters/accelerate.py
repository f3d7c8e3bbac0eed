"""Accelerate's `save_state` and `load_state`, to and from memory; see docs/transformers.md."""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import Any

try:
    import accelerate  # type: ignore[import-untyped, unused-ignore]
    from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError(f"{error}; accelerate is needed here: pip install 'torchelastic[transformers]'") from error

from torchelastic.adapters.hugging_face.rank_state import (
    LEADING,
    REPLICATED,
    RankState,
    belongs_to,
    own_part,
    part_from,
    require_unsharded,
    rng_state,
    save_step,
    set_rng_state,
    split_model,
    tensors_of,
)
from torchelastic.adapters.memory_tier import TIMEOUT_S, StorageTier
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId

__all__ = ["MemoryCheckpointer"]

log = logging.getLogger(__name__)


class MemoryCheckpointer:
    """Saves what `accelerator.save_state` saves to memory, and loads it as `load_state` does.

    That is: prepared models, optimizers, schedulers and dataloaders, the gradient scaler, objects given to
    `register_for_checkpointing`, the accelerator's step, and each rank's random numbers. Models and optimizers are
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

        A job of another number of ranks may load it; ranks above those that saved keep their random numbers.

        Returns:
            Its step; None if there is none, and then nothing has changed.

        Raises:
            CheckpointError: it cannot be read, or was saved with other numbers of models, optimizers and so on.
        """
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
        self._check(saved)
        self._apply(saved)
        if any(belongs_to(name, own) for name in tensors):
            self._apply_own(part_from(tensors, own))
        else:
            log.info("%s was saved by fewer ranks: rank %d keeps its random numbers", memory, self._tier.ranks.rank)
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
        accelerator = self._accelerator
        models = [split_model(self._unwrapped(model)) for model in accelerator._models]
        replicated = {
            "parameters": [parameters for parameters, _ in models],
            "optimizers": [optimizer.state_dict() for optimizer in accelerator._optimizers],
        }
        leading = {
            "buffers": [buffers for _, buffers in models],
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "objects": [one.state_dict() for one in accelerator._custom_objects],
            "dataloaders": [_position_of(dataloader) for dataloader in accelerator._dataloaders],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "step": accelerator.step,
            "extra": extra,
        }
        own = {
            "rng": rng_state(),
            "dataloaders": [one.state_dict() if _is_stateful(one) else None for one in accelerator._dataloaders],
        }
        return RankState(replicated, leading, own)

    def _unwrapped(self, model: Any) -> Any:
        return self._accelerator.unwrap_model(model, keep_torch_compile=False)

    def _check(self, saved: dict[str, Any]) -> None:
        if "optimizers" not in saved:
            raise CheckpointError(
                f"the checkpoint in {self._tier.container} was not saved by a MemoryCheckpointer: load it with what "
                "saved it, or give this job a container of its own"
            )
        accelerator = self._accelerator
        for what, states, present in (
            ("models", saved["parameters"], accelerator._models),
            ("optimizers", saved["optimizers"], accelerator._optimizers),
            ("schedulers", saved["schedulers"], accelerator._schedulers),
            ("dataloaders", saved["dataloaders"], accelerator._dataloaders),
            ("objects registered for checkpointing", saved["objects"], accelerator._custom_objects),
        ):
            if len(states) != len(present):
                raise CheckpointError(
                    f"the checkpoint in {self._tier.container} has {len(states)} {what}, and the accelerator has "
                    f"prepared {len(present)}: prepare and register the same as when it was saved, before load()"
                )

    def _apply(self, saved: dict[str, Any]) -> None:
        accelerator = self._accelerator
        for model, parameters, buffers in zip(accelerator._models, saved["parameters"], saved["buffers"], strict=True):
            self._unwrapped(model).load_state_dict({**parameters, **buffers})
        for objects, states in (
            (accelerator._optimizers, saved["optimizers"]),
            (accelerator._schedulers, saved["schedulers"]),
            (accelerator._custom_objects, saved["objects"]),
        ):
            for one, state in zip(objects, states, strict=True):
                one.load_state_dict(state)
        for dataloader, position in zip(accelerator._dataloaders, saved["dataloaders"], strict=True):
            _set_position(dataloader, position)
        if accelerator.scaler is not None and saved["scaler"] is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
        accelerator.step = saved["step"]

    def _apply_own(self, own: Any) -> None:
        for dataloader, state in zip(self._accelerator._dataloaders, own["dataloaders"], strict=True):
            if state is not None and _is_stateful(dataloader):
                dataloader.load_state_dict(state)
        self._random_numbers = own["rng"]
        self.restore_random_numbers()


def _is_stateful(dataloader: Any) -> bool:
    return bool(getattr(dataloader, "use_stateful_dataloader", False))


def _position_of(dataloader: Any) -> dict[str, Any]:
    """In which epoch a prepared dataloader is, and the seed that its order comes from."""
    position: dict[str, Any] = {"iteration": getattr(dataloader, "iteration", None)}
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler):
        position |= {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}
    return position


def _set_position(dataloader: Any, position: dict[str, Any]) -> None:
    if position["iteration"] is not None:
        dataloader.iteration = position["iteration"]
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    if isinstance(sampler, SeedableRandomSampler) and "initial_seed" in position:
        sampler.epoch, sampler.initial_seed = position["epoch"], position["initial_seed"]
