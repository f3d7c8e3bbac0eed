"""A model's state in checkpoints that all ranks write together: what it is, and what every rank holds alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchelastic.model import compiled


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
        weights = {f"module/{compiled.plain_name(name)}" for name, _ in self.module.named_parameters()}
        return {name for name in names if name.startswith("optimizer/") or name in weights}
