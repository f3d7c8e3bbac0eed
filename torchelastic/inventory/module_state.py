"""A module's `state_dict` by the names of the module that was wrapped; see `inventory.names`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.inventory.module_values import faults, put_buffers
from torchelastic.inventory.names import is_prefixed, plain_name
from torchelastic.torch_internals.tensors import metadata_of, set_metadata


def state_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's state under the names of the module that was wrapped; the tensors are not copied."""
    state = module.state_dict()
    # activation checkpointing takes its prefix out of the names, and leaves it in those of the versions
    names = [*state, *(_versions_in(state) or ())]
    return _renamed(state, {name: plain_name(name) for name in state}) if any(map(is_prefixed, names)) else state


def load_into(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse, for names with or without prefixes.

    Raises:
        UnfitStateError: the state is of another model. (What torch raises, a RuntimeError, would be tried again.)
    """
    own, modules = list(module.state_dict()), [name for name, _ in module.named_modules()]
    if any(map(is_prefixed, (*own, *modules, *state))):
        prefixed = {plain_name(name): name for name in [*modules, *own]}
        state = _renamed(state, {name: prefixed.get(plain_name(name), name) for name in state}, prefixed)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UnfitStateError(
            f"the state that is loaded does not fit this model: {error}\nBuild the model as it was when this state was "
            "saved or sent, or save to another folder"
        ) from error


def parted(module: torch.nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `state_of` gave, as what the optimizers train (parameters), and the rest: buffers and extra state."""
    names = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        (parameters if name in names else others)[name] = value
    return parameters, others


def has_types_of(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether what is in a module's state has the types that another one's has."""
    own, given = ([getattr(value, "dtype", None) for value in one.values()] for one in (state_of(module), state))
    return own == given


def put_values(module: torch.nn.Module, values: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Have what another rank's module has beside its state, but for its flags, so that the state fits.

    Args:
        module: ours.
        values: what `values_of` gave there.
        state: the other one's `state_dict`.

    Raises:
        UnfitStateError: it is of another model; nothing has changed.
    """
    for fault in faults(module, values):
        raise UnfitStateError(
            f"the state that this worker receives does not fit this model: {fault}. Build the model as the other "
            "workers do, and share parameters before its ModelState is made"
        )
    stored = {plain_name(name) for name in state}
    put_buffers(module, values["buffers"], stored=stored, own=state_of(module).keys())


def _versions_in(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return metadata_of(state) if isinstance(state, OrderedDict) else None


def _renamed(
    state: Mapping[str, Any], names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> OrderedDict[str, Any]:
    """A state with other names; it keeps the versions of modules, by which they bring old states up to date.

    Args:
        state: of a module.
        names: the new ones.
        modules: those of the modules; None: without prefixes.
    """
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    versions = _versions_in(state)
    if versions is not None:
        given = {plain_name(name): version for name, version in versions.items()}
        placed = given if modules is None else {modules[name]: given[name] for name in modules.keys() & given.keys()}
        set_metadata(renamed, placed)
    return renamed
