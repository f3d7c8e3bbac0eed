"""What the adapters for Accelerate and Transformers do with the memory tier, and where they refuse to."""

from __future__ import annotations

import hashlib

import torch

from torchelastic.adapters.hugging_face.state import portion_of, replicated_bytes
from torchelastic.adapters.memory_tier import StorageTier


def distributed_kind() -> str:
    """How Accelerate runs this job: the value of its `DistributedType`, such as "MULTI_GPU"; at first "NO"."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]

    if not AcceleratorState._shared_state:
        return "NO"
    return str(AcceleratorState().distributed_type.value)


def refuse_sharding(what: str, kind: str) -> None:
    """Raises ValueError if a rank does not hold the whole model, by `distributed_kind`; names `what` was called."""
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(
            f"{what} saves what each rank holds whole (one process, or DDP), and this job runs with {kind}: for FSDP2 "
            'use torchelastic.checkpoint.BCPState(model, optimizer, framework="fsdp2") in your own loop; else save the '
            "sharded state dict by torch.distributed.checkpoint with "
            "torchelastic.checkpoint.memory.MemoryStorageWriter (Megatron-LM: torchelastic.adapters.megatron), or "
            "leave it to the framework's own checkpoints"
        )


def save_step(tier: StorageTier, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Saves a step in a tier, once the save before is through; see `StorageTier.save`. All ranks call it.

    Args:
        tier: of the job; opened if it is not.
        step: of the checkpoint.
        tensors: all of this rank, as `tensors_of` gave them; may be changed as soon as this returns.

    Raises:
        CheckpointError: the save before is still not through after the time-out.
    """
    tier.start()
    sizes_bytes = replicated_bytes(tensors)
    described = hashlib.sha256(repr(list(sizes_bytes.items())).encode()).hexdigest()
    seen = tier.ranks.all_gather(f"save step {step}", described)
    if len(set(seen)) == 1:  # else some rank has what another has not, and the planner finds out who writes what
        mine = portion_of(tier.ranks.rank, len(seen), sizes_bytes)
        tensors = {name: tensor for name, tensor in tensors.items() if name in mine or name not in sizes_bytes}
    tier.save(tier.path_of(step), tensors)
