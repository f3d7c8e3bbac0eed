"""Gradients that a committed train step leaves for the next ones, until an optimizer steps: accumulation over steps.

They are a part of the training state then: a step that fails must not take those of the steps before with it, and a
worker that joins needs them. (The average over the workers keeps what all of them have.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from torchelastic.torch_internals.tensors import version_of


class LeftGradients:
    """Of the parameters of some optimizers; on the training thread.

    Args:
        optimizers: all of a state; groups may be added to them.

    Attributes:
        are_left: whether the last committed steps have left any: none has stepped an optimizer since a backward pass.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.are_left = False
        self._spent: tuple[TensorWeakRef, int] | None = None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """A train step begins, which may change them in place."""
        self._kept = [(one, one.grad.clone()) for one in self._all() if one.grad is not None] if self.are_left else []

    def commit(self, *, has_stepped: bool) -> None:
        """It has succeeded; `has_stepped`: an optimizer has."""
        self._kept = []
        first = next((one.grad for one in self._all() if one.grad is not None), None)
        if has_stepped:
            self._spent = None if first is None else (TensorWeakRef(first), version_of(first))
            self.are_left = False
        else:
            self.are_left = first is not None and not self._is_spent(first)

    def _is_spent(self, gradient: torch.Tensor) -> bool:
        """Whether no backward pass has changed it since an optimizer has used it."""
        if self._spent is None:
            return False
        spent, version = self._spent
        return spent() is gradient and version_of(gradient) == version

    def put_back(self) -> bool:
        """Those of before the step, which has failed or was left out; returns whether there were any."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        return bool(self._kept)

    def by_name(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """What a worker that joins needs; not copied.

        Args:
            parameters: of the model, by name.
        """
        found = ((name, one.grad) for name, one in parameters.items()) if self.are_left else ()
        return {name: gradient for name, gradient in found if gradient is not None}

    def take(self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """The inverse, of another worker: a parameter that is not in it has none."""
        self._kept = []
        for name, one in parameters.items():
            gradient = gradients.get(name)
            one.grad = None if gradient is None else gradient.detach().to(one.device, copy=True)
        self.are_left = bool(gradients)

    def _all(self) -> Iterator[torch.Tensor]:
        return (one for optimizer in self._optimizers for group in optimizer.param_groups for one in group["params"])

    def __getstate__(self) -> dict[str, Any]:  # a parameter is pickled without its gradient
        return {**self.__dict__, "are_left": False, "_spent": None, "_kept": []}
