"""What a model's modules, parameters and buffers are called, whatever wrappers put into their names. Pure.

A compiled module holds the user's as `_orig_mod`, one with activation checkpointing as `_checkpoint_wrapped_module`.
Without these a checkpoint, or a worker that joins, fits whether either side is wrapped or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torchelastic.torch_internals.module_names import CHECKPOINTED, COMPILED
from torchelastic.torch_internals.tensors import slots_of

_WRAPPERS = frozenset({COMPILED, CHECKPOINTED})


def plain_name(name: str) -> str:
    """The name of a module, a parameter or a buffer without what wrappers have put into it.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    if COMPILED not in name and CHECKPOINTED not in name:  # most names: it is asked for all of them at each save
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_prefixed(name: str) -> bool:
    """Whether a wrapper has put something into a name."""
    return not _WRAPPERS.isdisjoint(name.split("."))


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module below one, and itself with the name ""; two that differ by a wrapper alone have the same name."""
    for name, one in module.named_modules():
        yield plain_name(name), one


class NamedParts(NamedTuple):
    """What `named_modules` and `named_parameters` give, by one walk over all modules, for several questions.

    Attributes:
        modules: as of `named_modules`.
        parameters: as of `named_parameters`.
    """

    modules: Sequence[tuple[str, torch.nn.Module]]
    parameters: Mapping[str, torch.nn.Parameter]


def named_parts(module: torch.nn.Module) -> NamedParts:
    """Of a module and all below it, as they are now."""
    modules = list(named_modules(module))
    first: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for path, one in modules:
        slots = slots_of(one)
        if slots is None:
            return NamedParts(modules, named_parameters(module))
        for key, parameter in slots.parameters.items():
            if parameter is not None and id(parameter) not in first:
                first[id(parameter)] = (joined(path, key), parameter)
    return NamedParts(modules, dict(first.values()))


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Each parameter once, by its first name."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def joined(module: str, key: str) -> str:
    """The name of what a module of that name has.

    >>> joined("", "bias"), joined("head", "bias")
    ('bias', 'head.bias')
    """
    return f"{module}.{key}" if module else key
