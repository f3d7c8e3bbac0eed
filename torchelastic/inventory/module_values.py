"""What a module has besides its weights, by name: what a worker that joins gets of it.

Flags and buffers are equal on all ranks, and are sent. Buffers go by the slot that they are in, so that those that have
grown, were made or were removed in the run arrive too, and those that are in no `state_dict`. Plain attributes may be
each rank's own: they are not sent, but a worker learns which of them have changed where its state comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torchelastic.inventory.attributes import put_tensor
from torchelastic.inventory.module_structure import STANDARD
from torchelastic.inventory.names import NamedParts, joined, named_modules, named_parameters, named_parts, plain_name
from torchelastic.torch_internals.tensors import slots_of

#: Flags by name: which parameters require no gradient ("frozen"), and which modules are in evaluation mode ("eval").
Flags = Mapping[str, Collection[str]]

_PLAIN = (bool, int, float, str, type(None))
#: Longer texts and lists are data, and no settings.
_MOST_CHARACTERS, _MOST_VALUES = 200, 16


def flags_of(module: torch.nn.Module, parts: NamedParts | None = None) -> Flags:
    """Of a module and all below it, whose parts are known, or are looked for."""
    modules, parameters = parts or named_parts(module)
    return {
        "frozen": {name for name, value in parameters.items() if not value.requires_grad},
        "eval": {name for name, one in modules if not one.training},
    }


def put_flags(module: torch.nn.Module, flags: Flags) -> None:
    """Have the flags of another rank's module; what it has not named trains.

    Not by `train()`: a module whose statistics are frozen may let that do nothing.
    """
    for name, parameter in named_parameters(module).items():
        if parameter.requires_grad is (name in flags["frozen"]):
            parameter.requires_grad_(name not in flags["frozen"])
    for name, one in named_modules(module):
        one.training = name not in flags["eval"]


def values_of(module: torch.nn.Module) -> dict[str, Any]:
    """What is sent of a module beside its `state_dict`: plain values and tensors, which are not copied."""
    return {"flags": flags_of(module), "buffers": buffers_of(module), "ties": ties_of(module)}


def faults(module: torch.nn.Module, values: Mapping[str, Any]) -> list[str]:
    """Why a module cannot have the values of another rank's, in words; changes nothing.

    Args:
        module: ours.
        values: what `values_of` gave there.
    """
    own, ties = ties_of(module), values["ties"]
    return [
        f"{name!r} is {_tied(ties, name)} there and {_tied(own, name)} here"
        for name in sorted(own.keys() | ties.keys())
        if own.get(name) != ties.get(name)
    ]


def ties_of(module: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, and the first of each."""
    first = {id(parameter): name for name, parameter in named_parameters(module).items()}
    every = ((plain_name(name), one) for name, one in module.named_parameters(remove_duplicate=False))
    return {name: first[id(one)] for name, one in every if first[id(one)] != name}


def _tied(ties: Mapping[str, str], name: str) -> str:
    return f"one with {ties[name]!r}" if name in ties else "a parameter of its own"


def buffers_of(module: torch.nn.Module, parts: NamedParts | None = None) -> dict[str, torch.Tensor | None]:
    """What is in each slot for a buffer, by name; without those that the first forward pass is going to make."""
    return {
        joined(path, key): buffer
        for path, one in (named_modules(module) if parts is None else parts.modules)
        for key, buffer in _slots(one).items()
        if not _is_unmade(buffer)
    }


def put_buffers(
    module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None], stored: Collection[str], own: Collection[str]
) -> None:
    """Have the buffers of another rank's module, before its `state_dict` is loaded.

    A buffer that is persistent here and is not there stays: the `state_dict` will not fit, for it is another model.

    Args:
        module: ours.
        buffers: what `buffers_of` gave there.
        stored: the names in the other one's `state_dict`.
        own: those in this one's.
    """
    modules = dict(named_modules(module))
    for path, one in modules.items():
        slots = _slots(one)
        for key in [key for key in slots if joined(path, key) not in buffers and joined(path, key) not in own]:
            if not _is_unmade(slots[key]):
                delattr(one, key)  # torch forgets then, too, whether it was persistent
    for name, value in buffers.items():
        path, _, key = name.rpartition(".")
        if path in modules:  # else the `state_dict` does not fit either
            _put_buffer(modules[path], key, value, is_stored=name in stored)


def _put_buffer(module: torch.nn.Module, key: str, value: torch.Tensor | None, *, is_stored: bool) -> None:
    slots = _slots(module)
    own = slots.get(key)
    if key not in slots:
        vars(module).pop(key, None)  # a script may have had None there until it registers a buffer
        module.register_buffer(key, value, persistent=is_stored or value is None)
    elif value is None or own is None:
        slots[key] = value
    elif not _is_unmade(own):
        try:
            put_tensor(own, value)
        except RuntimeError:  # another kind of tensor, such as a sparse one
            slots[key] = value.to(own.device)


def _is_unmade(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and bool(is_lazy(buffer))


def _slots(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    slots = slots_of(module)
    return {} if slots is None else slots.buffers


# --- attributes -------------------------------------------------------------------------------------------------------


def attributes_of(module: torch.nn.Module, parts: NamedParts | None = None) -> dict[str, Any]:
    """The plain attributes of a module and of all below it by name: numbers, texts and short lists of them."""
    return {
        joined(path, name): list(value) if type(value) is list else value
        for path, one in (named_modules(module) if parts is None else parts.modules)
        for name, value in vars(one).items()
        if name not in STANDARD and _is_plain(value)
    }


def changed_attributes(
    module: torch.nn.Module, before: Mapping[str, Any], parts: NamedParts | None = None
) -> dict[str, Any]:
    """Those that are others than before, or new."""
    return {
        name: value
        for name, value in attributes_of(module, parts).items()
        if name not in before or repr(value) != repr(before[name])
    }


class PlainAttributes:
    """Finds quickly, again and again, which plain attributes of a module are others than when this was made.

    Args:
        module: and all below it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = attributes_of(module)
        self._changed: dict[str, Any] = {}
        self._look()

    def changed(self) -> dict[str, Any]:
        """See `changed_attributes`."""
        if any(_differs(values, length, seen) for values, length, seen in self._seen):
            self._changed = changed_attributes(self._module, self._before)
            self._look()
        return self._changed

    def _look(self) -> None:
        self._seen = [
            (values, len(values), {name: _remembered(value) for name, value in values.items() if name not in STANDARD})
            for values in (vars(one) for _, one in named_modules(self._module))
        ]


def _differs(values: Mapping[str, Any], length: int, seen: Mapping[str, Any]) -> bool:
    return len(values) != length or not all(
        name in values and (values[name] is value or (type(value) is list and values[name] == value))
        for name, value in seen.items()
    )


def _remembered(value: Any) -> Any:
    """What can change in place is remembered by what is in it."""
    return list(value) if type(value) is list and _is_plain(value) else value


def put_attributes(module: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    """Have these attributes; those of modules that are not there are left out."""
    modules = dict(named_modules(module))
    for name, value in attributes.items():
        path, _, key = name.rpartition(".")
        if path in modules:
            setattr(modules[path], key, list(value) if type(value) is list else value)


def differing_attributes(module: torch.nn.Module, others: Mapping[str, Any]) -> list[str]:
    """How the attributes of another rank's module differ from ours, one sentence each.

    >>> differing_attributes(torch.nn.Dropout(0.5), {"p": 0.5})
    []
    >>> differing_attributes(torch.nn.Dropout(0.5), {"p": 0.1, "q": 1})
    ['p is 0.1 there and 0.5 here', 'q is 1 there and not set here']
    >>> differing_attributes(torch.nn.LazyLinear(2), {"in_features": 4})
    []
    """
    own = attributes_of(module)
    # the first forward pass of a lazy module sets them
    unmade = {path for path, one in named_modules(module) if isinstance(one, LazyModuleMixin)}
    return [
        f"{name} is {value!r} there and {f'{own[name]!r} here' if name in own else 'not set here'}"
        for name, value in others.items()
        if (name not in own or repr(value) != repr(own[name])) and name.rpartition(".")[0] not in unmade
    ]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_VALUES and all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN and (type(value) is not str or len(value) <= _MOST_CHARACTERS)
