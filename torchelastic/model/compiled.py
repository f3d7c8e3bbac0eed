"""The names in a module's state without the marks that `torch.compile` leaves in them.

A compiled module holds the user's as `_orig_mod`, and so says every name in its state. Without that a checkpoint, or a
newcomer, fits whether either side is compiled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_MARK = "_orig_mod."


def state_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's state under the names of the module that was compiled; the tensors are not copied."""
    state = module.state_dict()
    return {plain_name(name): value for name, value in state.items()} if any(map(_is_marked, state)) else state


def load_into(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse, for names with or without marks. Raises what `load_state_dict` does."""
    own = list(module.state_dict())
    if any(map(_is_marked, own)) or any(map(_is_marked, state)):
        marked = {plain_name(name): name for name in own}
        state = {marked.get(plain_name(name), name): value for name, value in state.items()}
    module.load_state_dict(state)


def _is_marked(name: str) -> bool:
    return _MARK in name


def plain_name(name: str) -> str:
    """A name without the marks."""
    return name.replace(_MARK, "")
