"""The memory tier, as the adapters for Accelerate and Transformers use it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.adapters.hugging_face.state import portion_of, replicated_bytes
from torchelastic.adapters.memory_tier import FAILURES, TIMEOUT_S, StorageTier, container_of
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId

DEFAULT_TIMEOUT_S = TIMEOUT_S


def distributed_kind() -> str:
    """How Accelerate runs this job: the value of its `DistributedType`, such as "MULTI_GPU"; at first "NO"."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]

    if not AcceleratorState._shared_state:
        return "NO"
    return str(AcceleratorState().distributed_type.value)


def refuse_sharding(what: str, kind: str) -> None:
    """Raises where the ranks do not hold the whole model each.

    Args:
        what: names the caller in the error.
        kind: as `distributed_kind` says.

    Raises:
        ValueError: the job runs with FSDP, DeepSpeed, Megatron-LM or XLA; says what to use.
    """
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(
            f"{what} saves what each rank holds whole (one process, or DDP), and this job runs with {kind}: save its "
            "sharded state dict by torch.distributed.checkpoint with "
            "torchelastic.checkpoint.memory.MemoryStorageWriter (Megatron-LM: torchelastic.adapters.megatron), or "
            "leave it to the framework's own checkpoints"
        )


class HuggingFaceTier(StorageTier):
    """A tier in the container of this job. All ranks call all methods, in the same order, from the main thread.

    Args:
        base: the container of the job; None: `job_container()`.
        async_save: `save_step` returns as soon as the values have been copied.
        timeout_s: how long one save may take, and how long ranks wait for each other.

    Raises:
        ValueError: the base is no absolute path, or it is not given and the job has no run id; or the time is not above
            0.
    """

    def __init__(
        self,
        base: CheckpointContainerId | str | os.PathLike[str] | None,
        *,
        async_save: bool,
        timeout_s: float,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds above 0")
        super().__init__(container_of(base), async_save=async_save, timeout_s=timeout_s)

    @property
    def rank(self) -> int:
        """Of this process; 0 without a process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def save_step(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Saves a step, once the save before is through; see `save`.

        Args:
            step: of the checkpoint.
            tensors: all of this rank, as `tensors_of` gave them; may be changed as soon as this returns.

        Raises:
            CheckpointError: the save before is still not through after the time-out.
        """
        self.start()
        sizes_bytes = replicated_bytes(tensors)
        described = hashlib.sha256(repr(list(sizes_bytes.items())).encode()).digest()
        seen = self.gather(described)
        if len(set(seen)) == 1:  # else some rank has what another has not, and the planner finds out who writes what
            mine = portion_of(self.rank, len(seen), sizes_bytes)
            tensors = {name: tensor for name, tensor in tensors.items() if name in mine or name not in sizes_bytes}
        name = CheckpointContainerId.format_version_container(step)
        self.save(str(CheckpointContainerId.create_child(self.container, name)), tensors)

    def newest_step(self) -> tuple[CheckpointContainerId, int] | None:
        """The newest complete checkpoint and its step; see `newest`."""
        self.start()
        self.wait()
        found = self.newest()
        step = None if found is None else CheckpointContainerId.parse_version_container_step(found.name)
        return None if found is None or step is None else (found, step)

    def gather(self, value: Any) -> list[Any]:
        """What all ranks have given, by rank: plain values. Waits for the save that is under way: it uses the group."""
        self.wait()
        group = self._opened().group
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def attempt(self, action: Callable[[], None]) -> None:
        """Runs an action on all ranks. Raises: CheckpointError, on all of them, if it fails on one; names it."""
        failure = None
        try:
            action()
        except (*FAILURES, OSError, KeyError, TypeError, ValueError) as error:  # the others must not wait for this one
            failure = f"{type(error).__name__}: {error}"
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(failure)) if text is not None]
        if failures:
            raise CheckpointError("; ".join(failures))

    def end(self) -> None:
        """Closes when the save that is under way is through; what was saved stays. Nothing if it is not open."""
        if self._open is not None:
            super().end()
