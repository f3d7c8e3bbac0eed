"""Gradients of the global batch where ranks have different numbers of samples; see `ModelState`, which does it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.errors import NonRetryableException
from torchelastic.model.loss_counts import LossCounts, Tally, nothing
from torchelastic.sharded.blank import memory_of
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten


class GradientWeights:
    """Scales what flows back into a model by the share of this rank's samples.

    FSDP averages gradients over the ranks; each rank's mean over its own samples counts by its share of the global
    batch only if it is scaled before that.

    Args:
        sampler: has the share as `weight`; else all ranks count alike.
        counts: of losses that are sums: FSDP's averages of those are multiplied behind it.
        backward_begins: called before anything flows back into the model.
    """

    def __init__(
        self, sampler: Any, counts: LossCounts | None = None, backward_begins: Callable[[], None] = lambda: None
    ) -> None:
        self._sampler, self._counts = sampler, LossCounts(sampler) if counts is None else counts
        self.backward_begins = backward_begins
        self._size = self._alike = 1
        self._model: torch.nn.Module | None = None
        self._group: dist.ProcessGroup | None = None
        self._was_scaled = self.is_accumulating = False

    @property
    def scale(self) -> float:
        """By how much this rank's gradients are multiplied before they are averaged."""
        return float(getattr(self._sampler, "weight", 1.0 / self._size)) * self._size

    def enter_group(self, model: torch.nn.Module, size: int, group: dist.ProcessGroup | None = None) -> None:
        """Take a model for a new group, of so many ranks with different samples.

        Args:
            model: as it was built for this group.
            size: how many ranks have different samples.
            group: of all ranks, for small messages; None: this rank is alone.
        """
        self._size, self._model, self._group = size, model, group
        world_size = 1 if group is None else dist.get_world_size(group)
        self._alike = max(1, world_size // size)  # ranks that have the same samples, and count them too
        self._counts.rank = 0 if group is None else dist.get_rank(group)
        if size > 1:
            model.register_forward_hook(self._around_output)

    def begin_step(self) -> None:
        """A step begins."""
        self._was_scaled = False
        self._counts.begin_step()

    def backward(self, loss_sum: Any, count: Any) -> None:
        """See `WithCompanions.backward`: the backward pass, then what FSDP has averaged as a mean over the counts."""
        counts = self._counts
        assert self._model is not None
        counts.set_aside(self._model.parameters())
        loss = counts.add(loss_sum, count, beforehand=nothing)  # FSDP has one scale for all ranks
        with counts.running():
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            if self.is_accumulating:
                return
            self._settle()
        counts.raise_error()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                memory_of(parameter.grad).mul_(self._size / (counts.total or 1.0))
        counts.put_together()

    def _settle(self) -> None:
        """Exchange the tallies; behind the backward pass, where a rank that gives none does it too (see `check`)."""
        row = torch.tensor(self._counts.tally().row(), dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(row, group=self._group)
        tally = Tally.of_row(row.tolist())
        self._counts.settle(replace(tally, count=tally.count / self._alike))

    def check(self) -> None:
        """Asked before the optimizer steps.

        Raises:
            NonRetryableException: the shares differ and nothing was scaled; or UnfitError, see `LossCounts`.
            RuntimeError: a peer was lost.
        """
        if self._counts.are_used and not self._counts.are_used_in_step:
            self._settle()
        self._counts.optimizer_begins()
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
        if self._counts.is_running:
            return gradient
        self._counts.found_plain()
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
