"""Gradients of the global batch where ranks have different numbers of samples; see `ModelState`, which does it too."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torchelastic.coordinator import NonRetryableException


class Weighting:
    """Scales what flows back into a model by the share of this rank's samples.

    FSDP averages gradients over the ranks; each rank's mean over its own samples counts by its share of the global
    batch only if it is scaled before that.

    Args:
        sampler: has the share as `weight`; else all ranks count alike.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._size = 1
        self._was_scaled = False

    @property
    def scale(self) -> float:
        """By how much this rank's gradients are multiplied before they are averaged."""
        return float(getattr(self._sampler, "weight", 1.0 / self._size)) * self._size

    def enter_group(self, model: torch.nn.Module, size: int) -> None:
        """Take a model for a new group, of so many ranks with different samples."""
        self._size = size
        if size > 1 and hasattr(self._sampler, "weight"):
            # said where inputs have no gradients, such as tokens: the hook gets those of the outputs, as it should
            warnings.filterwarnings("ignore", "Full backward hook is firing when gradients", UserWarning)
            model.register_full_backward_pre_hook(self._hook)

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
                "with it: state.model must return a tensor, or a tuple of tensors, of which the loss is computed; or "
                "choose a global batch size that every usable world size divides"
            )

    def _hook(self, _module: torch.nn.Module, gradients: Any) -> Any:
        self._was_scaled = True
        scale = self.scale
        if abs(scale - 1.0) <= 1e-9:
            return None
        return tuple(None if gradient is None else gradient * scale for gradient in gradients)
