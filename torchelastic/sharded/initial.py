"""First values of a model that was built on the meta device: one module at a time, and never the whole model.

Each module's parameters and buffers are made whole for a moment, initialized, and each rank keeps its part of them. All
ranks draw the same random numbers, so the values are those of a single process, whatever the world size. Nothing is
kept of a tensor that had values when the model was built, or that a module before has given some: as in one process,
where tied weights are made twice and the first are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import region_of
from torchelastic.errors import NonRetryableException
from torchelastic.inventory.names import plain_name
from torchelastic.sharded.blank import BlankSlot, is_marked, left_blank, mark, memory_of
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import children_of, give_tensors, own_tensors, version_of

Initialize = Callable[[torch.nn.Module], object]


def initialize_model(blank: Sequence[BlankSlot], initialize: Initialize | None) -> None:
    """Give a sharded model, whose memory is there and holds nothing yet, its first values.

    Args:
        blank: what holds nothing.
        initialize: called with each module that has any of these, which are whole then, as by `Module.apply`. What it
            leaves out gets the values of `reset_parameters`, as in one process. Default: that alone.

    Raises:
        NonRetryableException: a tensor holds nothing after that; names it.
    """
    _require_none(_initialized(blank, blank, initialize), initialize)


def complete_model(blank: Sequence[BlankSlot], initialize: Initialize | None) -> None:
    """Compute the buffers that a state has not brought which was taken over, such as a rotary table of an older one.

    Args:
        blank: what held nothing before.
        initialize: see `initialize_model`. All is drawn again, so that random values are those of the first start.

    Raises:
        NonRetryableException: as `initialize_model`.
    """
    lacking = left_blank(blank)
    if lacking:
        _require_none(_initialized(blank, lacking, initialize), initialize)


@torch.no_grad()
def _initialized(
    blank: Sequence[BlankSlot], wanted: Collection[BlankSlot], initialize: Initialize | None
) -> list[BlankSlot]:
    """Initialize the modules of `blank` and keep what is wanted; returns what of that still holds nothing."""
    filled: set[int] = set()
    sought = {id(slot.value) for slot in wanted}
    for _, group in groupby(blank, key=lambda slot: id(slot.module)):
        slots = [slot for slot in group if slot.value is not None]
        for whole in _attempts(slots, initialize):
            for slot in slots:
                value = slot.of(whole).get(slot.key)
                if value is None or is_marked(value) or id(slot.value) in filled:
                    continue
                if id(slot.value) in sought:
                    _take(slot, value)
                filled.add(id(slot.value))
            if all(id(slot.value) in filled for slot in slots):
                break
    return [slot for slot in wanted if id(slot.value) not in filled]


def _attempts(slots: Sequence[BlankSlot], initialize: Initialize | None) -> Iterator[torch.nn.Module]:
    """The module that has these, whole and initialized, in each way that there is."""
    if not slots:
        return
    module = slots[0].module
    if initialize is not None:
        whole = _whole_twin(module, slots)
        before = _versions(whole)
        initialize(whole)
        if changed := [name for name, version in _versions(whole).items() if version != before[name]]:
            raise NonRetryableException(
                f"initialize() was called with the {type(whole).__name__} {_name(slots[0])!r} and has changed "
                f"{shortlist(changed)} of other modules: it is called with each module, and is to set just those "
                "parameters and buffers that the module itself has"
            )
        yield whole
    whole = _whole_twin(module, slots)
    if callable(reset := getattr(whole, "reset_parameters", None)):
        reset()
        yield whole


def _take(slot: BlankSlot, value: torch.Tensor) -> None:
    """Keep this rank's part of the value that the whole module has."""
    own = slot.value
    if not slot.is_parameter and not isinstance(own, DTensor) and value.shape != own.shape:
        slot.values[slot.key] = value.to(own.device)  # made anew, of another size
        return
    memory_of(own).copy_(value[region_of(own).within(Region.whole(value.shape))])


def _require_none(lacking: Sequence[BlankSlot], initialize: Initialize | None) -> None:
    """Raises NonRetryableException if there are any; names the modules."""
    if not lacking:
        return
    told = []
    for _, group in groupby(lacking, key=lambda slot: id(slot.module)):
        slots = list(group)
        module = slots[0].module
        names = shortlist([slot.key for slot in slots])
        has_reset = callable(getattr(module, "reset_parameters", None))
        lacks = [
            *([] if initialize is None else ["initialize() leaves them out"]),
            "its reset_parameters() leaves them out" if has_reset else "it has no reset_parameters()",
        ]
        told.append(
            f"the module {_name(slots[0])!r} is a {_class_of(module).__name__}, was built on the meta device, and "
            f"holds nothing yet in {names}: {', and '.join(lacks)}"
        )
    more = f"; and {len(told) - 3} more such modules" if len(told) > 3 else ""
    raise NonRetryableException(
        f"{'; '.join(told[:3])}{more}. Set them in reset_parameters(), or in ShardedState(initialize=...), which is "
        "called with each module that has such parameters or buffers of its own; or make them on the CPU in build(mesh)"
    )


def _name(slot: BlankSlot) -> str:
    """Of its module, for people."""
    return plain_name(slot.path) or "(the model itself)"


def _versions(module: torch.nn.Module) -> dict[str, int]:
    """What changes when a parameter of a module below this one is changed, by its name."""
    return {plain_name(name): version_of(one) for name, one in module.named_parameters() if "." in name}


def _whole_twin(module: torch.nn.Module, blank: Collection[BlankSlot]) -> torch.nn.Module:
    """The same module, as the user's class has it, with whole tensors of its own; those of `blank` hold nothing yet."""
    kind = _class_of(module)
    twin: torch.nn.Module = object.__new__(kind)
    twin.__dict__ = dict(module.__dict__)
    parameters, buffers = own_tensors(module)
    are_blank = {slot.key for slot in blank if not slot.is_parameter}
    give_tensors(
        twin,
        {
            key: None if value is None else torch.nn.Parameter(_empty(value), requires_grad=value.requires_grad)
            for key, value in parameters.items()
        },
        {
            key: None if value is None else _empty(value) if key in are_blank else value.clone()
            for key, value in buffers.items()
        },
        {key: child and _shadow(child) for key, child in children_of(module).items()},
    )
    return twin


def _shadow(module: torch.nn.Module) -> torch.nn.Module:
    """A module below one that is initialized: what that one does to its parameters has no effect, and draws nothing.

    Each module is initialized by itself; and of one that is only to compute its buffers the weights are loaded already.
    """
    shadow: torch.nn.Module = object.__new__(_class_of(module))
    shadow.__dict__ = dict(module.__dict__)
    parameters, buffers = own_tensors(module)
    give_tensors(
        shadow,
        {
            key: value
            if value is None
            else torch.nn.Parameter(
                torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=value.requires_grad
            )
            for key, value in parameters.items()
        },
        {key: None if value is None else value.clone() for key, value in buffers.items()},
        {key: child and _shadow(child) for key, child in children_of(module).items()},
    )
    return shadow


def _class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The user's class."""
    kind = type(module)
    if issubclass(kind, FSDPModule):
        # `fully_shard` puts a class of its own before the user's, and `replicate`, which is built on it, two
        return kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    return kind


def _empty(value: torch.Tensor) -> torch.Tensor:
    device = value.to_local().device if isinstance(value, DTensor) else value.device
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    mark(made)
    return made
