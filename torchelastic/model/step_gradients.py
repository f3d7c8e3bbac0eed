"""The gradients of a step: how they become those of the global batch, and what is kept of them when the step fails.

What a rank has computed of a step in which a worker was lost can count in the second attempt: the ranks of the next
group agree on who computes the rest (see `data.shares`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from torchelastic.data.shares import SecondDeal, second_deals
from torchelastic.errors import RetryableException, UnfitError
from torchelastic.group.step_course import RehearsedError, StepCourse
from torchelastic.inventory.generators import Generators, generators
from torchelastic.inventory.names import named_parameters
from torchelastic.metrics import publish_metric
from torchelastic.model import wrapping
from torchelastic.model.batch_norms import SingleSamples, least_local_batch
from torchelastic.model.companions import Companions
from torchelastic.model.compute_check.options import ComputeCheck
from torchelastic.model.compute_check.step_checks import checks_of
from torchelastic.model.ddp_errors import static_without_sync
from torchelastic.model.ddp_options import checked_options
from torchelastic.model.logical_shards import LogicalShards, OfStep
from torchelastic.model.loss_counts import all_at_once
from torchelastic.model.reduction import Reduction
from torchelastic.model.salvage_rules import check_mode, check_parameters
from torchelastic.model.step_kind import kind_of
from torchelastic.model.step_model import step_model
from torchelastic.model.transfer import all_gathered
from torchelastic.model.tree_sum import leaves_of
from torchelastic.torch_internals.gradients import is_in_backward

log = logging.getLogger(__name__)
_Check = Callable[[], None]


@dataclass(frozen=True)
class KeptGradients:
    """Gradients of some units of a failed step, for the second attempt, and the state after it on this rank.

    Attributes:
        step: committed steps when it began.
        units: whose gradients these are.
        gradients: not weighted yet; as `Reduction` or `LogicalShards` gave them.
        buffers: of the module, after the samples had gone through it.
        random: after the step's draws.
    """

    step: int
    units: frozenset[int]
    gradients: Any
    buffers: tuple[torch.Tensor, ...]
    random: Generators


class Salvaged(NamedTuple):
    """What became of the last step that was salvaged: counts of units (samples, or logical shards) over all ranks."""

    step: int
    kept: int
    recomputed: int
    postponed: int


class Needs(NamedTuple):
    """What a rank needs of all ranks of its group: the largest of each counts.

    Attributes:
        counts: 1: losses have had counts, so that every reduction says whether there is one.
        samples: of each rank, if it has any.
        no_checks: 1: what workers compute is checked no more.
        gone_back: how often the run has gone back to a checkpoint, see `Rollback`.
    """

    counts: int
    samples: int
    no_checks: int
    gone_back: int


class StepGradients:
    """One per `ModelState`; used on the training thread.

    Args:
        module: the plain module.
        own: has the user's sampler, or None, and the counts of losses that are sums.
        logical_shards: see `ModelState`.
        salvage: see `ModelState`.
        find_unused_parameters: as for DDP.
        ddp: further options of DDP, see `ddp_options`.
        check: see `ModelState`.

    Attributes:
        salvaged: the last step that was salvaged; None while there was none.

    Raises:
        ValueError: things that do not go together.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        own: Companions,
        logical_shards: int | None,
        salvage: str,
        find_unused_parameters: bool,
        ddp: Mapping[str, Any] | None,
        check: ComputeCheck | None = None,
    ) -> None:
        wrapping.check_made(module)
        sampler, counts = own.sampler, own.counts
        self._ddp = checked_options(
            ddp, find_unused_parameters=find_unused_parameters, salvage=salvage, logical_shards=logical_shards
        )
        check_mode(salvage, sampler, logical_shards, self._ddp["find_unused_parameters"])
        if salvage != "discard" or logical_shards is not None:
            check_parameters(module, logical_shards)
        self._module, self._sampler, self._mode = module, sampler, salvage
        self._counts = counts
        self._is_accumulating = False
        self._wrapped: torch.nn.parallel.DistributedDataParallel | None = None
        self._single_samples = SingleSamples(module, sampler)
        self._step_model = step_model(module, self._call, self.no_sync)
        self._frozen: dict[str, torch.nn.Parameter] = {}  # what this group's wrapper leaves out
        self._rank = 0
        if logical_shards is not None:
            sampler.set_logical_shards(logical_shards)
        self._source = (
            Reduction(module, sampler, counts)
            if logical_shards is None
            else LogicalShards(module, logical_shards, counts)
        )
        if isinstance(self._source, Reduction):
            self._source.ends_early = salvage == "discard"
        self.checks = checks_of(check, module, sampler, logical_shards, self._ddp)
        self.rollback = None if self.checks is None else self.checks.record.rollback
        if self.checks is not None and isinstance(self._source, Reduction):
            self._source.note = self.checks.repeats.note
        self.salvaged: Salvaged | None = None
        self._thawing: frozenset[str] = frozenset()  # what the step that was refused trains, and its wrapper left out
        self._kept: KeptGradients | None = None
        self._is_brought = False

    @property
    def kind(self) -> tuple[int, ...]:
        """See `step_kind`."""
        shards = self._source.shards if isinstance(self._source, LogicalShards) else 0
        return kind_of(shards, self._mode, 0 if self.checks is None else self.checks.kind, self._ddp)

    @property
    def needs(self) -> Needs:
        """What this rank knows of."""
        is_off = self.checks is not None and self.checks.record.is_off
        gone_back = 0 if self.rollback is None else self.rollback.count
        return Needs(int(self._counts.are_used), least_local_batch(self._module), int(is_off), gone_back)

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in a step: one object for the whole run, where the user's class allows that."""
        if self._step_model is not None:
            return self._step_model
        return self._module if self._wrapped is None else self._wrapped

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What `model` does when it is called: the present group's wrapper, if there is one."""
        target = self._module if self._wrapped is None else self._wrapped
        if self.checks is not None:
            return self.checks.called(self._single_samples.called, target, *args, **kwargs)
        return self._single_samples.called(target, *args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro batches but the last, forward and backward. Raises UnfitError: the graph is static."""
        if self._ddp["static_graph"]:
            raise static_without_sync()
        was_accumulating, self._is_accumulating = self._is_accumulating, True
        try:
            with self._source.accumulating(self._wrapped) if isinstance(self._source, Reduction) else nullcontext():
                yield
        finally:
            self._is_accumulating = was_accumulating

    def backward(self, loss_sum: Any, count: Any) -> None:
        """See `WithCompanions.backward`."""
        counts, source = self._counts, self._source
        if not counts.are_used:
            counts.watch(list(self._module.parameters()))
        if isinstance(source, LogicalShards):
            with counts.running():
                counts.add(loss_sum, count).backward()  # type: ignore[no-untyped-call]  # torch has no types here
            return
        counts.set_aside(self._module.parameters())
        # where this worker is alone, nothing is reduced
        is_divided_here = self._wrapped is None and not self._is_accumulating
        loss = counts.add(loss_sum, count, beforehand=all_at_once if is_divided_here else None)
        with counts.running():
            loss.backward()  # type: ignore[no-untyped-call]  # as above
            if is_divided_here:
                counts.settle(counts.tally())
        counts.raise_error()
        if is_divided_here and counts.scale != counts.total:
            self._multiply(counts.scale / (counts.total or 1.0))
        if counts.is_divided:
            counts.put_together()

    def _multiply(self, factor: float) -> None:
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.detach().mul_(factor)

    def shards(self, loader: Iterator[Any], step: int) -> Iterator[Any]:
        """See `ModelState.shards`."""
        batch = next(loader)  # here, and not in a generator, where StopIteration would be an error
        if not isinstance(self._source, LogicalShards):
            return iter((batch,))
        (share, *more) = self._sampler.pending
        if more:
            raise UnfitError("with logical_shards a step goes through state.shards(loader) once")
        units = self._sampler.pending_units()
        empty = set(range(self._source.shards)) - set(self._sampler.present_units)
        of = OfStep(share.global_samples, int(self._sampler.seed), step)
        return self._source.each(batch, units, empty, of, None if self.checks is None else self.checks.shard_check())

    # --- a step -----------------------------------------------------------------------------------

    def course(self, batches: Callable[[], int], steps: Callable[[], tuple[int, ...]], check: _Check) -> StepCourse:
        """What the steps do with these gradients, from now on; called once."""
        course = StepCourse(batches, self._reductions, steps, partial(self._check_end, check))
        self._source.at = course.pass_
        return course

    def _check_end(self, check_others: _Check) -> None:
        self._source.check_end()
        check_others()
        if self.checks is not None:
            self.checks.before_optimizer()  # where there was none

    def _reductions(self) -> int:
        return self._source.begun

    @property
    def rank(self) -> int:
        """Of this process in the present group."""
        return self._rank

    def begin_step(self, step: int) -> None:
        """A step (or another attempt at one) begins, after so many committed ones."""
        self._source.begin_step()
        self._counts.begin_step()
        if self.checks is not None:
            self.checks.begin_step(step)
            if self.checks.rehearses and isinstance(self._source, Reduction):
                self._source.skip(RehearsedError("the step was a rehearsal"))

    @property
    def are_salvaged(self) -> bool:
        """Whether what a failed step has computed may count in the next attempt."""
        return self._mode != "discard"

    @property
    def have_gone_on(self) -> bool:
        """Whether more of them were reduced since an optimizer last began in this step."""
        return isinstance(self._source, Reduction) and self._source.has_gone_on

    def check_reduced(self, is_first: bool) -> None:
        """Asked before each optimizer of a step begins.

        Args:
            is_first: of this train step.

        Raises:
            SkippedError: all ranks leave the step out.
            RehearsedError: it is computed again, to compare.
            RetryableException: this rank has left out what the others wait for, or the group's wrapper has.
            UnfitError: the step is not written for logical shards, leaves parameters out, or is in its backward pass.
        """
        if is_in_backward():
            raise UnfitError(
                "an optimizer steps inside a backward pass (in a hook of `register_post_accumulate_grad_hook`, say), "
                "where the gradient is that of this worker alone, and not yet of the global batch: step it behind "
                "backward(), without the hook"
            )
        thawed = {name for name, parameter in self._frozen.items() if parameter.requires_grad}
        if thawed:
            self._thawing |= thawed
            raise RetryableException(
                "parameters require a gradient that did not when this group was formed, and are not averaged: the step "
                "is repeated in a new group"
            )
        if any(not parameter.requires_grad for parameter in self._parameters(self._thawing)):
            self._thawing = frozenset()  # this attempt does not train them: if it waits for them, the next one must not
        if isinstance(self._source, Reduction):
            self._source.has_gone_on = False
            if self.checks is not None and self.checks.rehearses:
                self.checks.before_optimizer()
            self._source.raise_if_skipped()
        self._counts.optimizer_begins()
        if is_first and (self._wrapped is not None or isinstance(self._source, LogicalShards)):
            self._source.check_reduced(self._rank)
        if is_first and self.checks is not None:
            self.checks.before_optimizer()

    def keep(self, step: int, buffers: Sequence[torch.Tensor]) -> None:
        """A step has failed before the optimizer began: keep what this rank has computed of it, and had kept before.

        Called before anything is rolled back; takes the gradients off the parameters.
        """
        if self._mode == "discard" or (self._kept is not None and not self._is_brought):
            return  # or: nothing was computed since, because no group was formed
        before = self._kept if self._is_brought else None
        self._kept, self._is_brought = None, False
        pending = self._sampler.pending
        if len(pending) > 1:
            log.info("step %d drew several global batches: it is repeated as a whole", step)
            return
        units: frozenset[int] = frozenset() if before is None else before.units
        if isinstance(self._source, LogicalShards):
            gradients: Any = self._source.take()
            units = leaves_of(gradients or {}, self._source.shards) & frozenset(self._sampler.present_units)
        else:
            if self._source.has_local and pending:
                units |= frozenset(unit for unit, _ in self._sampler.pending_units())
            gradients = self._source.take(pending[0].local_samples if pending else 0)
        if not gradients or not units:
            return
        if before is None:
            copies = tuple(buffer.clone() for buffer in buffers)
            self._kept = KeptGradients(step, units, gradients, copies, generators())
        else:  # the second attempt was at a part of the samples only
            self._kept = replace(before, units=units, gradients=gradients)

    def forget(self) -> None:
        """A step has failed later than that: what this attempt has added to what was kept is not known any more."""
        self._kept, self._is_brought = None, False

    def skip(self) -> None:
        """The step is left out, with what was kept of an earlier attempt at it."""
        self.forget()
        self._source.bring(None)

    def commit(self, buffers: Callable[[], Sequence[torch.Tensor]]) -> None:
        """The step has succeeded: running statistics and random numbers are those of the whole first attempt."""
        kept, is_brought = self._kept, self._is_brought
        self.forget()
        self._thawing = frozenset()
        self._source.commit()
        if self.checks is not None:
            self.checks.committed()
        if kept is None or not is_brought or isinstance(self._source, LogicalShards):
            return
        present = buffers()
        if [buffer.shape for buffer in present] == [value.shape for value in kept.buffers]:  # else they are others now
            with torch.no_grad():
                for buffer, value in zip(present, kept.buffers, strict=True):
                    buffer.copy_(value)
        kept.random.put()

    # --- a group ----------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Take the wrapper of the last group off."""
        wrapping.unwrap(self._wrapped)
        self._wrapped = None
        self._frozen = {}
        if self.checks is not None:
            self.checks.leave_group()

    @property
    def thaws(self) -> int:
        """How many parameters the next group's wrapper has to have because the step, which is undone, thaws them."""
        return len(self._thawing)

    def share_thawing(self, counts: Sequence[int], device: torch.device) -> None:
        """Have the same wrapper on all ranks; called on every rank of a new group.

        Args:
            counts: by rank, what `thaws` gave.
            device: where messages must lie.

        Raises:
            RuntimeError: a peer is lost.
        """
        if any(counts):
            names = list(named_parameters(self._module))
            mine = torch.tensor([name in self._thawing for name in names], dtype=torch.uint8, device=device)
            found = torch.stack(all_gathered(mine, len(counts))).amax(0).tolist()
            self._thawing = frozenset(name for name, is_thawed in zip(names, found, strict=True) if is_thawed)

    def offer(self, step: int) -> int:
        """How many units of a failed step this rank could bring to a second attempt."""
        return len(self._kept.units) if self._kept is not None and self._kept.step == step else 0

    def enter_group(self, offers: Sequence[int], needs: Needs, step: int, rank: int, device: torch.device) -> None:
        """Wrap the module for a new group; called on every rank of it, when all are in sync.

        Args:
            offers: by rank, what `offer` gave; 0 for those that were synchronized, whose kept gradients are void.
            needs: of all ranks.
            step: committed steps.
            rank: of this process.
            device: where messages must lie.

        Raises:
            RuntimeError: a peer is lost.
        """
        world_size = len(offers)
        self._rank = self._counts.rank = rank
        if needs.counts:
            self._counts.are_used = True
            self._counts.watch(list(self._module.parameters()))
        if hasattr(self._sampler, "set_min_local_batch"):
            self._sampler.set_min_local_batch(needs.samples)
        if hasattr(self._sampler, "set_world"):
            self._sampler.set_world(rank, world_size)
        self._settle(offers, step, device)
        if self.checks is not None:
            off, times = bool(needs.no_checks), needs.gone_back
            self.checks.enter_group(rank, world_size, step, is_off=off, times_gone_back=times)
        if not isinstance(self._source, Reduction):
            return
        self._source.world_size = world_size
        with self._thawed():
            frozen = {name: one for name, one in named_parameters(self._module).items() if not one.requires_grad}
            has_gradients = any(parameter.requires_grad for parameter in self._module.parameters())
            # also a single worker, if it has gradients to add to those of the step
            if has_gradients and (world_size > 1 or self._is_brought):
                self._wrapped = wrapping.wrap(self._module, self._source.hook, self._ddp)
                self._source.watch(self._wrapped)
        self._frozen = frozen if world_size > 1 else {}

    @contextmanager
    def _thawed(self) -> Iterator[None]:
        """Meanwhile those parameters require a gradient that the step is going to thaw."""
        frozen = [parameter for parameter in self._parameters(self._thawing) if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _parameters(self, names: frozenset[str]) -> list[torch.nn.Parameter]:
        if not names:
            return []
        return [parameter for name, parameter in named_parameters(self._module).items() if name in names]

    def _settle(self, offers: Sequence[int], step: int, device: torch.device) -> None:
        """Agree on the second attempt."""
        kept, self._kept, self._is_brought = self._kept, None, False
        self._source.bring(None)
        if not any(offers):
            return
        mine = kept.units if kept is not None and offers[self._rank] else frozenset()
        units = _gather_units(mine, self._sampler.units, len(offers), device)
        present = self._sampler.present_units
        deals = second_deals(units, present, self._mode, getattr(self._sampler, "least_units", 1))
        self._sampler.deal_again(deals[self._rank])
        self.salvaged = _summary(step, deals, present)
        log.info(
            "step %d: the gradients of %d of %d %s are kept, %d are computed anew, %d count later in the epoch", step,
            self.salvaged.kept, len(present), "shards" if isinstance(self._source, LogicalShards) else "samples",
            self.salvaged.recomputed, self.salvaged.postponed,
        )  # fmt: skip
        for name in ("kept", "recomputed", "postponed"):
            publish_metric("torchelastic", f"salvage.{name}", getattr(self.salvaged, name))
        # until the step commits the kept gradients stay, for a third attempt
        self._kept = kept if deals[self._rank].carried else None
        self._is_brought = self._kept is not None
        if self._kept is not None:
            self._source.bring(self._kept.gradients)

    def __getstate__(self) -> dict[str, Any]:
        # a group's wrapper belongs to this process alone
        return {**self.__dict__, "_wrapped": None, "_step_model": None, "_frozen": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._step_model = step_model(self._module, self._call, self.no_sync)


def _summary(step: int, deals: Sequence[SecondDeal], present: Sequence[int]) -> Salvaged:
    there = frozenset(present)
    kept = sum(len(there.intersection(deal.carried)) for deal in deals)
    return Salvaged(step, kept, sum(len(deal.compute) for deal in deals), len(deals[0].postponed))


def _gather_units(mine: frozenset[int], units: int, world_size: int, device: torch.device) -> list[frozenset[int]]:
    mask = torch.zeros(units, dtype=torch.uint8)
    mask[sorted(mine)] = 1
    return [frozenset(one.nonzero().flatten().tolist()) for one in all_gathered(mask.to(device), world_size)]
