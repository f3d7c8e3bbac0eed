"""What a model that was built on the meta device lacks: tensors that have memory now, and hold nothing yet.

Memory that was never written looks like any other: a rotary table in it is silently wrong in every step. So what holds
nothing is filled with a pattern that no tensor has by chance, and what still has it when the first step could begin is
known by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchelastic.inventory.copies import bytes_of, is_dense
from torchelastic.torch_internals.sharding import local_part
from torchelastic.torch_internals.tensors import own_tensors

#: Of each four bytes: no number in any format of floats, none of the two of a bool, and not the same byte throughout.
_PATTERN = (0xC5, 0xA5, 0xC5, 0xFF)
_AS_INT32 = int.from_bytes(bytes(_PATTERN), "little", signed=True)


class BlankSlot(NamedTuple):
    """Where a module has a parameter or a buffer of its own.

    Attributes:
        path: of the module.
        module: it.
        key: the tensor's name in it.
        is_parameter: whether it is a parameter; else a buffer.
    """

    path: str
    module: torch.nn.Module
    key: str
    is_parameter: bool

    @property
    def values(self) -> dict[str, Any]:
        """The dict that the slot is in."""
        return self.of(self.module)

    @property
    def value(self) -> Any:
        """What is in it now; None: nothing, or it is gone."""
        return self.values.get(self.key)

    def of(self, module: torch.nn.Module) -> dict[str, Any]:
        """The same dict of another module."""
        parameters, buffers = own_tensors(module)
        return parameters if self.is_parameter else buffers


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of one; shares its memory."""
    return local_part(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def give_memory(model: torch.nn.Module, device: torch.device) -> list[BlankSlot]:
    """Give memory to all tensors of a model that are on the meta device; what has values keeps them.

    Args:
        model: sharded.
        device: where the memory is to be; tensors that have values go there too.

    Returns:
        What holds nothing yet, in the order of the modules; empty: nothing was on the meta device, and nothing is done.

    Raises:
        TypeError: this torch has a module's tensors elsewhere.
    """
    slots = [
        BlankSlot(path, module, key, is_parameter)
        for path, module in model.named_modules()
        for is_parameter, values in zip((True, False), own_tensors(module), strict=True)
        for key, value in values.items()
        if value is not None
    ]
    blank = [slot for slot in slots if memory_of(slot.value).is_meta]
    if not blank:
        return []
    filled = [(slot, memory_of(slot.value)) for slot in slots if not memory_of(slot.value).is_meta]
    first: dict[int, BlankSlot] = {}
    shared = [(slot, first.setdefault(id(slot.value), slot)) for slot in slots if not slot.is_parameter]
    # an attribute beside a buffer, such as the one that it began with, is the same tensor
    beside = [
        (values, name, first[id(value)])
        for values in map(vars, model.modules())
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and id(value) in first
    ]
    model.to_empty(device=device)
    for slot, value in filled:
        memory_of(slot.value).copy_(value)
    for slot, other in shared:  # `to_empty` makes a buffer that two modules share two
        slot.values[slot.key] = other.value
    for values, name, slot in beside:
        values[name] = slot.value
    for slot in blank:
        if not slot.is_parameter:  # parameters come whole, or are initialized; only a step can leave them out
            mark(slot.value)
    return blank


def left_blank(blank: Sequence[BlankSlot]) -> list[BlankSlot]:
    """The buffers among these that still hold nothing."""
    return [slot for slot in blank if not slot.is_parameter and slot.value is not None and is_marked(slot.value)]


@torch.no_grad()
def mark(tensor: torch.Tensor) -> None:
    """Fill a tensor that holds nothing with the pattern; one of a kind that cannot be filled stays as it is."""
    local = memory_of(tensor)
    if is_dense(local) and local.numel():
        memory = bytes_of(local)
        if memory.numel() % len(_PATTERN):
            times = memory.numel() // len(_PATTERN) + 1
            memory.copy_(torch.tensor(_PATTERN, dtype=torch.uint8).repeat(times)[: memory.numel()])
        else:
            memory.view(torch.int32).fill_(_AS_INT32)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds the pattern, and nothing else.

    >>> blank = torch.empty(3, dtype=torch.float16)
    >>> mark(blank)
    >>> is_marked(blank), bool(blank.isnan().all()), is_marked(blank.fill_(0))
    (True, False, False)
    """
    local = memory_of(tensor)
    if not is_dense(local) or not local.numel():
        return False
    memory = bytes_of(local)
    begin = memory[: len(_PATTERN)].tolist()
    if tuple(begin) != _PATTERN[: len(begin)]:
        return False
    rest = memory.numel() % len(_PATTERN)
    if rest and tuple(memory[-rest:].tolist()) != _PATTERN[:rest]:
        return False
    return bool((memory[: memory.numel() - rest].view(torch.int32) == _AS_INT32).all())
