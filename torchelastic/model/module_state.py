"""A module's state: without the prefixes that `torch.compile` adds to its names, and in checkpoints of all ranks.

A compiled module holds the user's as `_orig_mod`, which is in every name of its state. Without that prefix a
checkpoint, or a new worker, fits whether either side is compiled or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

_PREFIX = "_orig_mod."


def state_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's state under the names of the module that was compiled; the tensors are not copied."""
    state = module.state_dict()
    return {plain_name(name): value for name, value in state.items()} if any(map(_has_prefix, state)) else state


def load_into(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse, for names with or without prefixes. Raises what `load_state_dict` does."""
    own = list(module.state_dict())
    if any(map(_has_prefix, own)) or any(map(_has_prefix, state)):
        prefixed = {plain_name(name): name for name in own}
        state = {prefixed.get(plain_name(name), name): value for name, value in state.items()}
    module.load_state_dict(state)


def _has_prefix(name: str) -> bool:
    return _PREFIX in name


def plain_name(name: str) -> str:
    """A name without the prefixes."""
    return name.replace(_PREFIX, "")


class InCheckpoints(ABC):
    """For a state that has `state_dict` and `load_state_dict`."""

    module: torch.nn.Module

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything; the tensors are not copied."""

    @abstractmethod
    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """The inverse."""

    def checkpoint_tree(self) -> dict[str, Any]:
        """What is saved: the state_dict; no weight is copied."""
        return self.state_dict()

    def load_checkpoint_tree(self, tree: dict[str, Any]) -> None:
        """Set the whole state from what was saved."""
        self.load_state_dict(tree)

    def replicated(self, names: Sequence[str]) -> Collection[str]:
        """Weights and the optimizer's tensors are equal on all ranks; buffers and `extra` may be each rank's own."""
        weights = {f"module/{plain_name(name)}" for name, _ in self.module.named_parameters()}
        return {name for name in names if name.startswith("optimizer/") or name in weights}
