"""First values of a model that was built on the meta device: one module at a time, and never the whole model.

Each module's parameters and buffers are made whole for a moment, initialized, and each rank keeps its part of them. All
ranks draw the same random numbers, so the values are those of a single process, whatever the world size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import region_of
from torchelastic.errors import NonRetryableException
from torchelastic.sharded.built import memory_of
from torchelastic.torch_internals.tensors import give_tensors, own_tensors

Initialize = Callable[[torch.nn.Module], object]


def initialize_model(model: torch.nn.Module, initialize: Initialize | None) -> None:
    """Give a sharded model, whose memory is there and holds nothing yet, its first values.

    Args:
        model: sharded; its parameters are DTensors.
        initialize: called with each module that has parameters or buffers of its own, which are whole then, as by
            `Module.apply`. Default: its `reset_parameters`.

    Raises:
        NonRetryableException: a module has none, and `initialize` was not given; names it.
    """
    for name, module in model.named_modules():
        owns = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if owns:
            _initialize_one(name, module, initialize)


@torch.no_grad()
def _initialize_one(name: str, module: torch.nn.Module, initialize: Initialize | None) -> None:
    whole = _whole_twin(module)
    if initialize is not None:
        initialize(whole)
    elif callable(reset := getattr(whole, "reset_parameters", None)):
        reset()
    else:
        raise NonRetryableException(
            f"the module {name or '(the model itself)'!r} is a {type(whole).__name__}, was built on the meta device "
            "and has no reset_parameters(): give ShardedState(initialize=...), which is called with each module that "
            "has parameters of its own"
        )
    for mine, values in zip(own_tensors(module), own_tensors(whole), strict=True):
        for key, tensor in mine.items():
            if tensor is None:
                continue
            value = values[key]
            assert value is not None
            part = value[region_of(tensor).within(Region.whole(value.shape))]
            memory_of(tensor).copy_(part)


def _whole_twin(module: torch.nn.Module) -> torch.nn.Module:
    """The same module, as the user's class has it, with whole tensors of its own that hold nothing yet."""
    kind = type(module)
    if issubclass(kind, FSDPModule):
        # `fully_shard` puts a class of its own before the user's, and `replicate`, which is built on it, two
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    twin: torch.nn.Module = object.__new__(kind)
    twin.__dict__ = dict(module.__dict__)
    parameters, buffers = own_tensors(module)
    give_tensors(
        twin,
        {
            key: None if value is None else torch.nn.Parameter(_empty(value), requires_grad=value.requires_grad)
            for key, value in parameters.items()
        },
        {key: None if value is None else _empty(value) for key, value in buffers.items()},
    )
    return twin


def _empty(value: torch.Tensor) -> torch.Tensor:
    device = value.to_local().device if isinstance(value, DTensor) else value.device
    return torch.empty(value.shape, dtype=value.dtype, device=device)
