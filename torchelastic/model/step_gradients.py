"""The gradients of a step: how they become those of the global batch, and what is kept of them when the step fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchelastic.errors import NonRetryableException
from torchelastic.model import wrapping
from torchelastic.model.reduction import Reduction
from torchelastic.model.shards import LogicalShards
from torchelastic.model.step_salvage import Salvaged, StepSalvage, check_mode


class StepGradients:
    """One per `ModelState`; used on the training thread.

    Args:
        module: the plain module.
        sampler: the user's, or None.
        logical_shards: see `ModelState`.
        salvage: see `ModelState`.
        find_unused_parameters: as for DDP.

    Raises:
        ValueError: things that do not go together.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sampler: Any,
        logical_shards: int | None,
        salvage: str,
        find_unused_parameters: bool,
    ) -> None:
        check_mode(salvage, sampler, logical_shards)
        self._module, self._sampler = module, sampler
        self._find_unused_parameters = find_unused_parameters
        self._wrapped: torch.nn.parallel.DistributedDataParallel | None = None
        self._rank = 0
        if logical_shards is not None:
            sampler.set_logical_shards(logical_shards)
        self._source = Reduction(module, sampler) if logical_shards is None else LogicalShards(module, logical_shards)
        if isinstance(self._source, Reduction):
            self._source.ends_early = salvage == "discard"
        self._salvage = StepSalvage(salvage, self._source, sampler)

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in a step."""
        return self._module if self._wrapped is None else self._wrapped

    @property
    def salvaged(self) -> Salvaged | None:
        """The last step that was salvaged."""
        return self._salvage.last

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around all backward passes of a step but the last."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def shards(self, loader: Iterator[Any], step: int) -> Iterator[Any]:
        """See `ModelState.shards`."""
        batch = next(loader)  # here, and not in a generator, where StopIteration would be an error
        if not isinstance(self._source, LogicalShards):
            return iter((batch,))
        (share, *more) = self._sampler.pending
        if more:
            raise NonRetryableException("with logical_shards a step goes through state.shards(loader) once")
        units = self._sampler.pending_units()
        empty = set(range(self._source.shards)) - set(self._sampler.present_units)
        return self._source.each(batch, units, empty, share.global_samples, int(self._sampler.seed), step)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step (or another attempt at one) begins."""
        self._source.begin_step()

    def check_reduced(self) -> None:
        """Asked before the first optimizer of a step begins.

        Raises:
            RetryableException: this rank has left out what the others wait for.
            NonRetryableException: the step is not written for logical shards.
        """
        if self._wrapped is not None or isinstance(self._source, LogicalShards):
            self._source.check_reduced(self._rank)

    def keep(self, step: int, buffers: Sequence[torch.Tensor]) -> None:
        """The step has failed before any optimizer began; see `StepSalvage.keep`."""
        self._salvage.keep(step, buffers)

    def commit(self, buffers: Sequence[torch.Tensor]) -> None:
        """The step has succeeded."""
        self._salvage.commit(buffers)

    # --- a group ----------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Take the wrapper of the last group off."""
        wrapping.unwrap(self._wrapped)
        self._wrapped = None

    def offer(self, step: int) -> int:
        """How many units of a failed step this rank could bring to a second attempt."""
        return self._salvage.offer(step)

    def enter_group(self, offers: Sequence[int], step: int, rank: int, device: torch.device) -> None:
        """Wrap the module for a new group; called on every rank of it, when all are in sync.

        Args:
            offers: by rank, what `offer` gave; 0 for those that were synchronized.
            step: committed steps.
            rank: of this process.
            device: where messages must lie.

        Raises:
            RuntimeError: a peer is lost.
        """
        world_size = len(offers)
        self._rank = rank
        if hasattr(self._sampler, "set_world"):
            self._sampler.set_world(rank, world_size)
        self._salvage.settle(offers, step, rank, device)
        if not isinstance(self._source, Reduction):
            return
        self._source.world_size = world_size
        has_gradients = any(parameter.requires_grad for parameter in self._module.parameters())
        # also a single worker, if it has gradients to add to those of the step
        if has_gradients and (world_size > 1 or self._salvage.is_pending):
            self._wrapped = wrapping.wrap(
                self._module, self._source.hook, find_unused_parameters=self._find_unused_parameters
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wrapped": None}  # a group's wrapper belongs to this process alone
