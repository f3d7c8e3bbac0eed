"""The state of Accelerate and Transformers as the named tensors that DCP saves, and back; and where that is refused.

The state of a rank has three parts. Of what DDP replicates, every rank writes a portion (`portion_of`). What belongs to
rank 0 (buffers, which DDP broadcasts from there, schedules, counters) is written by rank 0 alone. What differs (random
numbers) is written by every rank under its own name. All that is no tensor is stored as JSON in a tensor of bytes.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchelastic.adapters.memory_tier import StorageTier
from torchelastic.adapters.values import from_json_tensor, json_tensor, mapped
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.tree import flatten, unflatten

REPLICATED, LEADING = "replicated", "leading"


@dataclass(frozen=True)
class RankState:
    """The state of one rank in a checkpoint; each part is nested plain values and tensors.

    Attributes:
        replicated: equal on all ranks, and written once.
        leading: that of rank 0; other ranks' values are ignored.
        own: of this rank only; None, when loaded, for a rank that did not save.
    """

    replicated: Any
    leading: Any
    own: Any


def own_part(rank: int) -> str:
    """The name of the part that only this rank has."""
    return f"rank-{rank}"


def tensors_of(state: RankState, rank: int) -> dict[str, torch.Tensor]:
    """All named tensors of a rank; none is copied.

    Raises:
        TypeError: something in it is neither a plain value nor a tensor, or is one rank's piece of a tensor (FSDP,
            tensor parallelism); names it.
    """
    leads = rank == 0
    named = _part(REPLICATED, state.replicated, with_structure=leads)
    if leads:
        named |= _part(LEADING, state.leading)
    return named | _part(own_part(rank), state.own)


def _part(part: str, tree: Any, *, with_structure: bool = True) -> dict[str, torch.Tensor]:
    flat = flatten(tree, allow_pickles=None)
    for one in flat.tensors:
        if one.is_shard:
            raise TypeError(
                f"{one.name} is sharded over the ranks (a DTensor), and only what each rank holds whole is saved here: "
                "use torch.distributed.checkpoint with torchelastic.checkpoint.memory.MemoryStorageWriter"
            )
    named = {f"{part}/{one.name}": one.tensor for one in flat.tensors}
    if with_structure:
        named[_structure_of(part)] = json_tensor(flat.structure)
    return named


def _structure_of(part: str) -> str:
    return f"{part}.json"


def replicated_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes of those tensors that all ranks have, in the order of their names."""
    return {
        name: tensors[name].numel() * tensors[name].element_size()
        for name in sorted(tensors)
        if name.startswith(f"{REPLICATED}/")
    }


def portion_of(rank: int, ranks: int, sizes_bytes: Mapping[str, int]) -> set[str]:
    """Which of the replicated tensors a rank writes: the largest first, each by the rank that has the least so far.

    DCP's planner would come to the same, but only after every rank has copied everything; so each rank gives it no more
    than its portion. (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969: at most 4/3 of the best split.)

    Args:
        rank: whose.
        ranks: how many there are.
        sizes_bytes: of all replicated tensors, the same on all ranks.

    >>> sorted(portion_of(1, 2, {"a": 5, "b": 4, "c": 3}))
    ['b', 'c']
    """
    loads = [(0, each) for each in range(ranks)]
    mine = set()
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        load_bytes, chosen = loads[0]
        heapq.heapreplace(loads, (load_bytes + max(1, sizes_bytes[name]), chosen))
        if chosen == rank:
            mine.add(name)
    return mine


def belongs_to(name: str, part: str) -> bool:
    """Whether an entry of the state dict belongs to a part."""
    return name == _structure_of(part) or name.startswith(f"{part}/")


def part_from(tensors: Mapping[str, torch.Tensor], part: str) -> Any:
    """A part of the state, out of the loaded state dict.

    Raises:
        CheckpointError: it is not there: other code has saved this checkpoint.
        CorruptCheckpointError: it is damaged.
    """
    structure = tensors.get(_structure_of(part))
    if structure is None:
        raise CheckpointError(
            f"the checkpoint has no part {part!r}, so other code has saved it: load it with that, or give this job a "
            "container of its own"
        )
    prefix = f"{part}/"
    mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    try:
        return unflatten(from_json_tensor(structure, f"part {part!r}"), mine, allow_pickles=None)
    except ValueError as error:
        raise CorruptCheckpointError(f"the checkpoint is damaged, in part {part!r}: {error}") from error


def split_model(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's state dict as what DDP keeps equal (parameters), and what it does not (buffers, extra state)."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parameters: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        (parameters if name in names else others)[name] = value
    return parameters, others


def rng_state() -> dict[str, Any]:
    """The state of this process's random numbers: Python's, NumPy's, torch's, and those of all CUDA devices."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`, for as many CUDA devices as there are now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def without_arrays(value: Any) -> Any:
    """The same nested value with lists and numbers in place of NumPy's arrays and scalars."""
    return mapped(value, lambda leaf: leaf.tolist() if isinstance(leaf, (np.ndarray, np.generic)) else leaf)


def distributed_kind() -> str:
    """How Accelerate runs this job: the value of its `DistributedType`, such as "MULTI_GPU"; at first "NO"."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped, unused-ignore]

    if not AcceleratorState._shared_state:
        return "NO"
    return str(AcceleratorState().distributed_type.value)


def require_unsharded(what: str, kind: str) -> None:
    """Raises ValueError if a rank does not hold the whole model, by `distributed_kind`; names `what` was called."""
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(
            f"{what} saves what each rank holds whole (one process, or DDP), and this job runs with {kind}: for FSDP2 "
            'use torchelastic.checkpoint.BCPState(model, optimizer, framework="fsdp2") in your own loop; else save the '
            "sharded state dict by torch.distributed.checkpoint with "
            "torchelastic.checkpoint.memory.MemoryStorageWriter (Megatron-LM: torchelastic.adapters.megatron), or "
            "leave it to the framework's own checkpoints"
        )


def save_step(tier: StorageTier, step: int, gather: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Saves a step in a tier, once the save before is through; see `StorageTier.save`. All ranks call it.

    Args:
        tier: of the job; opened if it is not.
        step: of the checkpoint.
        gather: gives all of this rank, as `tensors_of` does; what is in it may be changed as soon as this returns.

    Raises:
        CheckpointError: the save before is still not through after the time-out; or another rank has nothing to save,
            since its `gather` has failed.
        Exception: what the own `gather` has raised; the other ranks know it.
    """
    tier.start()
    tensors: dict[str, torch.Tensor] = {}
    sizes_bytes: dict[str, int] = {}

    def described() -> str:
        tensors.update(gather())
        sizes_bytes.update(replicated_bytes(tensors))
        return hashlib.sha256(repr(list(sizes_bytes.items())).encode()).hexdigest()

    seen = tier.ranks.run_on_all(f"save step {step}", described)
    if len(set(seen)) == 1:  # else some rank has what another has not, and the planner finds out who writes what
        mine = portion_of(tier.ranks.rank, len(seen), sizes_bytes)
        tensors = {name: tensor for name, tensor in tensors.items() if name in mine or name not in sizes_bytes}
    tier.save(tier.path_of(step), tensors)
