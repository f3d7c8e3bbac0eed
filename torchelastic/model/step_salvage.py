"""The gradients that a rank keeps of a failed step, and the agreement of the next group on who computes the rest."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from torchelastic.group.messages import all_gather_tensors
from torchelastic.metrics import publish_metric
from torchelastic.model import random_state
from torchelastic.model.reduction import Reduction
from torchelastic.model.salvage import MODES, second_deals
from torchelastic.model.shards import LogicalShards
from torchelastic.model.tree_sum import leaves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.data.shares import SecondDeal

log = logging.getLogger(__name__)


Gradients = TypeVar("Gradients")


@dataclass(frozen=True)
class KeptGradients(Generic[Gradients]):
    """Gradients of some units of a failed step, for the second attempt, and the state after it on this rank.

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
    random: random_state.RandomState


class Salvaged(NamedTuple):
    """What became of the last step that was salvaged: counts of units (samples, or logical shards) over all ranks."""

    step: int
    kept: int
    recomputed: int
    postponed: int


class StepSalvage:
    """One per `ModelState`; used on the training thread.

    Args:
        mode: "discard", "drop" or "recompute".
        gradients: where the step's gradients are.
        sampler: an `ElasticBatchSampler` or `ElasticStream`; unused with "discard".

    Attributes:
        last: see `Salvaged`; None while no step was salvaged.
    """

    def __init__(self, mode: str, gradients: Reduction | LogicalShards, sampler: Any) -> None:
        self.mode = mode
        self.last: Salvaged | None = None
        self._gradients, self._sampler = gradients, sampler
        self._kept: KeptGradients[Any] | None = None
        #: whether this rank brings gradients to the step that comes
        self.is_pending = False

    def keep(self, step: int, buffers: Sequence[torch.Tensor]) -> None:
        """A step has failed before the optimizer began: keep what this rank has computed of it, and had kept before.

        Called before anything is rolled back; takes the gradients off the parameters.
        """
        if self.mode == "discard" or (self._kept is not None and not self.is_pending):
            return  # or: nothing was computed since, because no group was formed
        before = self._kept if self.is_pending else None
        self._kept, self.is_pending = None, False
        pending = self._sampler.pending
        if len(pending) > 1:
            log.info("step %d drew several global batches: it is repeated as a whole", step)
            return
        units: frozenset[int] = frozenset() if before is None else before.units
        if isinstance(self._gradients, LogicalShards):
            gradients: Any = self._gradients.take()
            units = leaves_of(gradients or {}, self._gradients.shards) & frozenset(self._sampler.present_units)
        else:
            if self._gradients.has_local and pending:
                units |= frozenset(unit for unit, _ in self._sampler.pending_units())
            gradients = self._gradients.take(pending[0].local_samples if pending else 0)
        if not gradients or not units:
            return
        if before is None:
            copies = tuple(buffer.clone() for buffer in buffers)
            self._kept = KeptGradients(step, units, gradients, copies, random_state.capture())
        else:  # the second attempt was at a part of the samples only
            self._kept = replace(before, units=units, gradients=gradients)

    def offer(self, step: int) -> int:
        """How many units this rank could bring to a step."""
        return len(self._kept.units) if self._kept is not None and self._kept.step == step else 0

    def settle(self, offers: Sequence[int], step: int, rank: int, device: torch.device) -> None:
        """Agree on the second attempt; called on every rank of a new group, when all are in sync.

        Args:
            offers: by rank, what `offer` gave; 0 for those that were synchronized, whose kept gradients are void.
            step: committed steps.
            rank: of this process.
            device: where messages must lie.

        Raises:
            RuntimeError: a peer is lost.
        """
        kept, self._kept, self.is_pending = self._kept, None, False
        self._gradients.bring(None)
        if not any(offers):
            return
        mine = kept.units if kept is not None and offers[rank] else frozenset()
        units = _gather_units(mine, self._sampler.units, len(offers), device)
        present = self._sampler.present_units
        deals = second_deals(units, present, self.mode)
        self._sampler.deal_again(deals[rank])
        self.last = _summary(step, deals, present)
        log.info(
            "step %d: the gradients of %d of %d %s are kept, %d are computed anew, %d count later in the epoch", step,
            self.last.kept, len(present), "shards" if isinstance(self._gradients, LogicalShards) else "samples",
            self.last.recomputed, self.last.postponed,
        )  # fmt: skip
        for name in ("kept", "recomputed", "postponed"):
            publish_metric("torchelastic", f"salvage.{name}", getattr(self.last, name))
        # until the step commits the kept gradients stay, for a third attempt
        self._kept = kept if deals[rank].carried else None
        self.is_pending = self._kept is not None
        if self._kept is not None:
            self._gradients.bring(self._kept.gradients)

    def commit(self, buffers: Sequence[torch.Tensor]) -> None:
        """The step has succeeded: running statistics and random numbers are those of the whole first attempt."""
        kept, is_brought = self._kept, self.is_pending
        self._kept, self.is_pending = None, False
        self._gradients.commit()
        if kept is None or not is_brought or isinstance(self._gradients, LogicalShards):
            return
        with torch.no_grad():
            for buffer, value in zip(buffers, kept.buffers, strict=True):
                buffer.copy_(value)
        random_state.restore(kept.random)


def check_mode(mode: str, sampler: Any, logical_shards: int | None) -> None:
    """Raise ValueError for what does not go together."""
    if mode not in MODES:
        raise ValueError(f"salvage={mode!r} is not one of {', '.join(MODES)}")
    if (mode != "discard" or logical_shards is not None) and not hasattr(sampler, "deal_again"):
        what = f"salvage={mode!r}" if logical_shards is None else f"logical_shards={logical_shards}"
        raise ValueError(
            f"{what} needs ModelState(..., sampler=ElasticBatchSampler(...)), or an ElasticStream: it knows which "
            "samples a step has"
        )
    if mode == "drop" and logical_shards is not None:
        raise ValueError(
            "salvage='drop' changes what a step is trained on, so logical_shards could not give the same bits: use "
            "'discard' or 'recompute' with them"
        )


def _summary(step: int, deals: Sequence[SecondDeal], present: Sequence[int]) -> Salvaged:
    there = frozenset(present)
    kept = sum(len(there.intersection(deal.carried)) for deal in deals)
    return Salvaged(step, kept, sum(len(deal.compute) for deal in deals), len(deals[0].postponed))


def _gather_units(mine: frozenset[int], units: int, world_size: int, device: torch.device) -> list[frozenset[int]]:
    mask = torch.zeros(units, dtype=torch.uint8)
    mask[sorted(mine)] = 1
    gathered = all_gather_tensors(mask.to(device), world_size)
    return [frozenset(one.nonzero().flatten().tolist()) for one in gathered]
