"""A module's state without the prefixes that `torch.compile` adds to its names.

A compiled module holds the user's as `_orig_mod`, which is in every name of its state. Without that prefix a
checkpoint, or a new worker, fits whether either side is compiled or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.torch_internals.module_names import COMPILED

_PREFIX = f"{COMPILED}."


def state_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's state under the names of the module that was compiled; the tensors are not copied."""
    state = module.state_dict()
    return {plain_name(name): value for name, value in state.items()} if any(map(_has_prefix, state)) else state


def load_into(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse, for names with or without prefixes.

    Raises:
        UnfitStateError: the state is of another model. (What torch raises, a RuntimeError, would be tried again.)
    """
    own = list(module.state_dict())
    if any(map(_has_prefix, own)) or any(map(_has_prefix, state)):
        prefixed = {plain_name(name): name for name in own}
        state = {prefixed.get(plain_name(name), name): value for name, value in state.items()}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UnfitStateError(
            f"the state that is loaded does not fit this model: {error}\nBuild the model as it was when this state was "
            "saved or sent, or save to another folder"
        ) from error


def flags(module: torch.nn.Module) -> dict[str, set[str]]:
    """Which parameters require no gradient ("frozen"), and which modules are in evaluation mode ("eval"), by name."""
    return {
        "frozen": {plain_name(name) for name, value in module.named_parameters() if not value.requires_grad},
        "eval": {_name_of_module(name) for name, one in module.named_modules() if not one.training},
    }


def put_flags(module: torch.nn.Module, flags: Mapping[str, Collection[str]]) -> None:
    """Have the flags of another rank's module; what it has not named trains.

    Not by `train()`: a module whose statistics are frozen may let that do nothing.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(plain_name(name) not in flags["frozen"])
    for name, one in module.named_modules():
        one.training = _name_of_module(name) not in flags["eval"]


def _name_of_module(name: str) -> str:
    return plain_name(f"{name}.").removesuffix(".")


def _has_prefix(name: str) -> bool:
    return _PREFIX in name


def plain_name(name: str) -> str:
    """A name without the prefixes."""
    return name.replace(_PREFIX, "")
