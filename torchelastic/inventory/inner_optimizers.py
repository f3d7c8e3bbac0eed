"""Optimizers that other ones keep and step: SAM, Lookahead and the like.

The `state_dict` of the outer one often has nothing of what the inner one keeps (its momenta). Then it is sent and saved
beside it, by the place of the inner one among all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.inventory.optimizer_values import OWN_FORM, Named, named_state, numbered_state, state_of
from torchelastic.torch_internals.tensors import tree_flatten

Optimizer = torch.optim.Optimizer


def with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """These, and those that they keep in attributes."""
    found = list(optimizers)
    for one in found:  # grows meanwhile
        inner = (value for value in vars(one).values() if isinstance(value, Optimizer))
        found += [value for value in inner if not any(value is other for other in found)]
    return found


def inner_states(optimizers: Sequence[Optimizer], parameters: Named) -> list[Any]:
    """Of each inner optimizer, in the order of `with_inner`, its named state; None where an outer one's has it.

    Args:
        optimizers: those that the script has given.
        parameters: of the model.
    """
    inner = with_inner(optimizers)[len(optimizers) :]
    if not inner:
        return []
    saved = {id(tensor) for one in optimizers for tensor in _tensors_in(state_of(one))}
    return [None if _is_saved(one, saved) else named_state(one, parameters) for one in inner]


def put_inner_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Have what `inner_states` gave there; behind the states of the outer ones, with which the groups have come.

    Raises:
        UnfitStateError: these optimizers keep others; nothing has changed.
    """
    inner = with_inner(optimizers)[len(optimizers) :]
    if len(inner) != len(states):
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        raise UnfitStateError(
            f"the state that is loaded has {len(states)} optimizer(s) inside others, and {kinds} here keep(s) "
            f"{len(inner)}: build the optimizer as it was when this state was saved or sent"
        )
    for one, state in zip(inner, states, strict=True):
        if state is not None:
            one.load_state_dict(state[OWN_FORM] if OWN_FORM in state else numbered_state(state))


@contextmanager
def shared_groups(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Optimizers that have their groups in common still have when this ends: torch makes new ones when it loads."""
    shared = [
        (one, inner, inner.param_groups is one.param_groups)
        for one in with_inner(optimizers)
        for inner in vars(one).values()
        if isinstance(inner, Optimizer) and list(map(id, inner.param_groups)) == list(map(id, one.param_groups))
    ]
    try:
        yield
    finally:
        for one, inner, is_one_list in shared:
            inner.param_groups = one.param_groups if is_one_list else list(one.param_groups)


def _is_saved(inner: Optimizer, saved: set[int]) -> bool:
    own = {id(tensor) for tensor in _tensors_in(list(inner.state.values()))}
    return bool(own) and own <= saved


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    leaves, _ = tree_flatten(state)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
