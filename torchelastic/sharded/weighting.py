"""Gradients of the global batch where ranks have different numbers of samples; see `ModelState`, which does it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchelastic.errors import NonRetryableException
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten


class GradientWeights:
    """Scales what flows back into a model by the share of this rank's samples.

    FSDP averages gradients over the ranks; each rank's mean over its own samples counts by its share of the global
    batch only if it is scaled before that.

    Args:
        sampler: has the share as `weight`; else all ranks count alike.
        backward_begins: called before anything flows back into the model.
    """

    def __init__(self, sampler: Any, backward_begins: Callable[[], None] = lambda: None) -> None:
        self._sampler, self.backward_begins = sampler, backward_begins
        self._size = 1
        self._was_scaled = False

    @property
    def scale(self) -> float:
        """By how much this rank's gradients are multiplied before they are averaged."""
        return float(getattr(self._sampler, "weight", 1.0 / self._size)) * self._size

    def enter_group(self, model: torch.nn.Module, size: int) -> None:
        """Take a model for a new group, of so many ranks with different samples."""
        self._size = size
        if size > 1:
            model.register_forward_hook(self._around_output)

    def begin_step(self) -> None:
        """A step begins."""
        self._was_scaled = False

    def check(self) -> None:
        """Asked before the optimizer steps.

        Raises:
            NonRetryableException: the shares differ and nothing was scaled.
        """
        if not self._was_scaled and self._size > 1 and abs(self.scale - 1.0) > 1e-9:
            raise NonRetryableException(
                "this worker has another number of samples than the others, and its gradients could not be weighted "
                "with it: the loss must be computed of what state.model returns; or choose a global batch size that "
                "every usable world size divides"
            )

    def _around_output(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        """The output, whose tensors pass their gradients on scaled."""
        leaves, structure = tree_flatten(output)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places:
            return output
        # all in one: of two outputs of which one was computed from the other, neither is scaled twice
        passed = _Scale.apply(self, *(leaves[n] for n in places))  # type: ignore[no-untyped-call]  # torch has no types
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    def scaled(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What flows back into the model of a gradient of its output."""
        self._was_scaled = True
        scale = self.scale
        return gradient if gradient is None or abs(scale - 1.0) <= 1e-9 else gradient * scale


class _Scale(torch.autograd.Function):
    """Changes nothing on the way forth, and scales on the way back."""

    @staticmethod
    def forward(ctx: Any, weighting: GradientWeights, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.weighting = weighting
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.weighting.backward_begins()
        return (None, *(ctx.weighting.scaled(gradient) for gradient in gradients))
