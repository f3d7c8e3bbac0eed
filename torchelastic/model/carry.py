"""What a rank has kept of a step that failed, for the second attempt at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torchelastic.model.random_state import RandomState

#: For each parameter that wants a gradient, in the module's order: its sum over samples; None where it has none.
Sums = list[torch.Tensor | None]
Gradients = TypeVar("Gradients")


@dataclass(frozen=True)
class Carry(Generic[Gradients]):
    """The gradients of some units, and how the step left everything else on this rank.

    Attributes:
        step: committed steps when it began.
        units: whose gradients these are.
        gradients: not weighted yet.
        buffers: of the module, after the samples had gone through it.
        random: after the step's draws.
    """

    step: int
    units: frozenset[int]
    gradients: Gradients
    buffers: tuple[torch.Tensor, ...]
    random: RandomState


def summed(parameters: Sequence[torch.nn.Parameter], samples: int) -> Sums:
    """Take the gradients off the parameters: from means over `samples` samples to sums. Copies nothing."""
    sums: Sums = []
    for parameter in parameters:
        sums.append(None if parameter.grad is None else parameter.grad.detach().mul_(samples))
        parameter.grad = None
    return sums


def added(left: Sums, right: Sums) -> Sums:
    """The sum of two, in the memory of the first where it has any."""
    return [
        second if first is None else first if second is None else first.add_(second)
        for first, second in zip(left, right, strict=True)
    ]
