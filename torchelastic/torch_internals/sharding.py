"""DTensors, and the models that `fully_shard` has made of them. On the training thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchelastic.torch_internals.canary import check_torch, found, say_missing

check_torch()

_DTENSOR = "torch.distributed.tensor.DTensor"
_FSDP = "torch.distributed.fsdp._fully_shard"


def local_part(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a DTensor, the very memory; `to_local` takes ten times as long."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        say_missing(f"{_DTENSOR}._local_tensor")
        with torch.no_grad():
            local = tensor.to_local()
    assert isinstance(local, torch.Tensor)
    return local


class Description(NamedTuple):
    """What a DTensor is beside its local part, where torch has no object for that."""

    mesh: DeviceMesh
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


def description_of(tensor: DTensor) -> Any:
    """What a DTensor is beside its local part: for `described_by`, also in another process."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        say_missing(f"{_DTENSOR}._spec")
        return Description(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return spec


def described_by(description: Any, local: torch.Tensor) -> DTensor:
    """The DTensor with this local part."""
    if isinstance(description, Description):
        mesh, placements, shape, stride = description
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    made: Any = DTensor  # its constructor has no types
    tensor: DTensor = made(local, description, requires_grad=False)
    return tensor


def place_of_part(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets, in the whole tensor, of what this rank holds."""
    compute = found("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
    if compute is None:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch has no types here
        return tuple(chunks[0].sizes), tuple(chunks[0].offsets)
    sizes, offsets = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(offsets)


def flat_memory(module: torch.nn.Module) -> Iterator[Any]:
    """The objects in which FSDP2 holds the parameters of a module a second time, flat; see `release_flat_memory`."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        say_missing("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
        return
    held = state()
    groups = getattr(held, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has one at most
        if not hasattr(held, "_fsdp_param_group"):
            say_missing(f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups")
            return
        groups = [held._fsdp_param_group]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())


def release_flat_memory(module: torch.nn.Module) -> None:
    """Let go of the memory in which FSDP2 holds the parameters of a module a second time, flat."""
    for held in flat_memory(module):
        if hasattr(held, "_sharded_param_data"):
            held._sharded_param_data = torch.empty(0)
        else:
            say_missing(f"{_FSDP}._fsdp_param.FSDPParam._sharded_param_data")


def forget_meshes() -> None:
    """Have this thread forget how operations of DTensors are done, which torch remembers by their meshes."""
    clear = found("torch.distributed.tensor.debug._clear_sharding_prop_cache")
    if clear is not None:
        clear()
    else:  # torch before 2.13 has that memory too, and no function that clears it
        dispatcher = found(f"{_DTENSOR}._op_dispatcher")
        if dispatcher is not None:
            dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    plans = found("torch.distributed.tensor._redistribute._gen_transform_infos")
    if plans is not None:
        plans.cache_clear()
    clear = found("torch.distributed.tensor._redistribute.clear_redistribute_planner_cache")
    if clear is not None:
        clear()


def is_sharded(value: object) -> bool:
    """Whether a value is a tensor of which this rank holds a part: a DTensor, or one of FSDP1's."""
    of_fsdp1 = found("torch.distributed._shard.sharded_tensor.api.ShardedTensor")
    return isinstance(value, DTensor if of_fsdp1 is None else (DTensor, of_fsdp1))
