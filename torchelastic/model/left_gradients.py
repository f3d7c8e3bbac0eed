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
        self._spent: list[tuple[TensorWeakRef, int]] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """A train step begins, which may change them in place."""
        self._kept = [(one, one.grad.clone()) for one in self._all() if one.grad is not None] if self.are_left else []

    def commit(self, *, has_stepped: bool) -> None:
        """It has succeeded; `has_stepped`: an optimizer has."""
        self._kept = []
        if has_stepped:
            self._spent = [(TensorWeakRef(one), version_of(one)) for one in self._some()]
            self.are_left = False
        else:
            self.are_left = any(one.grad is not None for one in self._all()) and not self._are_spent()

    def _are_spent(self) -> bool:
        """Whether no backward pass has changed any since an optimizer has used them."""
        now = self._some()
        return 0 < len(now) == len(self._spent) and all(
            spent() is one and version == version_of(one)
            for (spent, version), one in zip(self._spent, now, strict=True)
        )

    def _some(self) -> list[torch.Tensor]:
        """Of the first parameter and of the last one: a look at each in every step takes too long."""
        groups = [group["params"] for one in self._optimizers for group in one.param_groups if group["params"]]
        ends = (groups[0][0].grad, groups[-1][-1].grad) if groups else ()
        return [one for one in ends if one is not None]

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
        return {**self.__dict__, "are_left": False, "_spent": [], "_kept": []}
