"""How gradients become those of the global batch: DDP's communication hook, which spoils nothing when a peer dies.

DDP copies each gradient into its bucket and takes the bucket's result back when the whole backward pass is over. So a
rank's own gradients are there until then, and the hook sees to it that either all buckets have succeeded or none is
taken back: the results are handed out by the last bucket, after it has waited for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchelastic.errors import RetryableException, UnfitError
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.group.step_course import COUNTED, FORWARD, REDUCTION, SkippedError, nowhere
from torchelastic.model.loss_counts import LossCounts, Tally
from torchelastic.model.transfer import message_device
from torchelastic.text import shortlist
from torchelastic.torch_internals.c10d_types import GradBucket

log = logging.getLogger(__name__)

#: For each parameter that requires a gradient, in the module's order: its sum over samples; None where it has none.
Sums = list[torch.Tensor | None]


@dataclass(frozen=True)
class KeptSums:
    """What was computed in an attempt that has failed.

    Attributes:
        sums: of gradients, over samples or over what losses were summed over.
        count: of the losses that are sums; None: they are means over samples.
    """

    sums: Sums
    count: float | None = None

    @property
    def tally(self) -> Tally:
        """Of these."""
        return Tally(0.0, plain=1) if self.count is None else Tally(self.count, counted=1)

    def plus(self, other: KeptSums) -> KeptSums | None:
        """Both, in the memory of this where it has any; None: they are of different kinds."""
        if self.count is None or other.count is None:
            return KeptSums(added(self.sums, other.sums)) if self.count is other.count else None
        return KeptSums(added(self.sums, other.sums), self.count + other.count)


def summed(parameters: Sequence[torch.nn.Parameter], factor: float) -> Sums:
    """Take the gradients off the parameters, multiplied: by the samples that they are means over. Copies nothing."""
    sums: Sums = []
    for parameter in parameters:
        sums.append(None if parameter.grad is None else parameter.grad.detach().mul_(factor))
        parameter.grad = None
    return sums


def added(left: Sums, right: Sums) -> Sums:
    """The sum of two, in the memory of the first where it has any."""
    return [
        second if first is None else first if second is None else first.add_(second)
        for first, second in zip(left, right, strict=True)
    ]


class Reduction:
    """The weighted sum of gradients over the ranks, and the local ones for as long as it has not succeeded.

    Args:
        module: the plain module.
        sampler: an `ElasticBatchSampler`, which knows how many samples are whose, or anything else.
        counts: of losses that are sums.

    Attributes:
        world_size: of the present group.
        ends_early: whether the backward pass ends with the first bucket that has failed; if not, it goes on, and
            `take` has this rank's gradients.
        has_gone_on: whether gradients were reduced since an optimizer last began in this step.
        at: called on the way into what all ranks do together: a forward pass that sends buffers, and a reduction.
        note: called with this rank's gradients, before they are averaged, and whether these are the last of a
            reduction; None: nobody wants them.
    """

    def __init__(self, module: torch.nn.Module, sampler: Any, counts: LossCounts | None = None) -> None:
        self.world_size = 1
        self.ends_early = self.has_gone_on = False
        self.at: Callable[[str], None] = nowhere
        self.note: Callable[[Sequence[torch.Tensor], bool], None] | None = None
        self._module, self._sampler = module, sampler
        self._counts = LossCounts(sampler) if counts is None else counts
        self._running: list[tuple[dist.Work, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._tally: tuple[dist.Work, torch.Tensor] | None = None
        self._kept: KeptSums | None = None
        self._begun = self._done = 0
        self._wrapped: list[tuple[str, torch.nn.Parameter]] = []
        self._is_expected = self._has_buffers = False
        self._usual: int | None = None
        self._skipped: Exception | None = None  # in this step nothing is reduced any more
        self._most = 0  # reductions in any step
        self._has_complained = self._has_said_where = False

    @property
    def weight(self) -> float:
        """By what this rank's gradient is multiplied before the sum: its share, or of a sum what it was divided by."""
        if self._counts.is_running:
            return self._counts.scale if self._counts.own else 0.0
        return float(getattr(self._sampler, "weight", 1.0 / self.world_size))

    @property
    def has_local(self) -> bool:
        """Whether the parameters hold this rank's own gradients: its backward pass was over, the reduction was not.

        A step that may have several reductions, or whose number is not known yet, had more to come.
        """
        return self._most == self._begun == 1 and not self._done

    @property
    def begun(self) -> int:
        """Reductions of this step that have come to their last bucket."""
        return self._begun

    def skip(self, error: Exception) -> None:
        """Reduce nothing in this step; `raise_if_skipped` raises the error."""
        self._skipped = error

    def check_end(self) -> None:
        """Raises RetryableException: the step ends in the middle of a backward pass, for which the others wait."""
        if self._running:
            raise RetryableException(
                "the step has ended in the middle of a backward pass, whose error it has caught: the others wait for "
                "its gradients, so it is undone on all ranks, and repeated"
            )

    def begin_step(self) -> None:
        """A step (or another attempt at one) begins."""
        self._running.clear()
        self._tally = None
        self._begun = self._done = 0
        self._is_expected = self.has_gone_on = False
        self._skipped = None

    def watch(self, wrapped: DistributedDataParallel) -> None:
        """Note whether a step calls the wrapper of the present group, so that a backward pass has to be reduced."""
        self._wrapped = [(name, one) for name, one in self._module.named_parameters() if one.requires_grad]
        self._has_buffers = any(True for _ in self._module.buffers())
        wrapped.register_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, wrapped: torch.nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
            self._is_expected = True
            if self._has_buffers:  # which are sent; else nothing is, and one rank may evaluate by itself
                self.at(FORWARD)

    @contextmanager
    def accumulating(self, wrapped: DistributedDataParallel | None) -> Iterator[None]:
        """Within it DDP reduces nothing, of a forward pass that is within it, too."""
        begun = self._begun
        with nullcontext() if wrapped is None else wrapped.no_sync():
            yield
        if self._begun > begun and not self._has_said_where:
            self._has_said_where = True
            log.warning(
                "a backward pass inside of no_sync() has averaged gradients over the workers, because its forward pass "
                "was outside: put both inside. Else each micro batch costs a message, and all ranks have to have "
                "equally many"
            )

    def bring(self, kept: KeptSums | None) -> None:
        """Add these to what this rank contributes, until the next call."""
        self._kept = kept

    def take(self, samples: int) -> KeptSums | None:
        """Take the gradients off the parameters, after a step has failed, as sums; with those that were kept before.

        Args:
            samples: how many of this rank's samples they are of, and their mean, if there is no count; 0 for padding.

        Returns:
            None: there are none of this rank alone, because its backward pass was not over, or was reduced already.
        """
        kept, self._kept = self._kept, None
        if self._begun == 0:
            return kept
        if not self.has_local:
            return None  # of several reductions in one step some are done: what is there is mixed
        if samples == 0:
            return kept
        if self._counts.is_counted:
            mine = KeptSums(summed(self._parameters(), self._counts.scale), self._counts.own)
        else:
            mine = KeptSums(summed(self._parameters(), samples))
        return mine if kept is None else mine.plus(kept)

    def commit(self) -> None:
        """The step has succeeded."""
        self._usual = self._done
        self._most = max(self._most, self._done)
        self._kept = None

    def raise_if_skipped(self) -> None:
        """Raise what this step is left out for, by all ranks; this one has heard it in its backward pass at last."""
        if self._skipped is not None:
            raise self._skipped

    def check_reduced(self, rank: int) -> None:
        """Asked before the optimizer steps, which must not change the weights where this rank has reduced nothing.

        Where it never did, which is right for a step that does it by itself, an error is logged once.

        Raises:
            UnfitError: the backward pass has not reached all parameters, for which DDP waits.
            RetryableException: nothing was reduced, other than usual, a reduction has failed, or parameters were frozen
                in this group.
        """
        if self._begun > self._done:
            raise RetryableException(
                f"rank {rank} steps its optimizer, though the reduction of gradients has failed: the step has caught "
                "that error"
            )
        if self._begun:
            return
        if self._is_expected:
            self._check_reached(rank)
        if self._usual:
            raise RetryableException(
                f"rank {rank} steps its optimizer without having reduced gradients, as it did in the step before: it "
                "has skipped backward() (of `state.model`'s output), for which the others wait, or frozen parameters"
            )
        if not self._has_complained:
            self._has_complained = True
            log.error(
                "rank %d steps its optimizer with gradients that were not averaged over the workers, so their weights "
                "drift apart: in the step call `state.model`, not the module that it was made of, nor a part of it. "
                "Gradients of torch.autograd.grad or torch.func, or set by hand, the step has to average itself, as "
                "own_gradients.py in docs/cookbook.md; where it does, all is well",
                rank,
            )

    def _check_reached(self, rank: int) -> None:
        unused = [name for name, one in self._wrapped if one.requires_grad and one.grad is None]
        if 0 < len(unused) < len(self._wrapped):
            raise UnfitError(
                f"rank {rank}: the backward pass gave no gradient to {shortlist(unused)}, and DDP averages none before "
                "all are there: give ModelState find_unused_parameters=True if a step does not use all parameters, or "
                "take out of the module, or freeze before, what no step uses"
            )
        if any(not one.requires_grad for _, one in self._wrapped):
            raise RetryableException(
                "parameters are frozen that required a gradient when this group was formed: the step is repeated in a "
                "new group (a step that freezes parameters by turns needs find_unused_parameters=True)"
            )

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one bucket; registered with `DistributedDataParallel.register_comm_hook`."""
        result: torch.futures.Future[torch.Tensor]
        self.has_gone_on = True
        if self.note is not None:
            self.note(bucket.gradients(), bucket.is_last())
        if not self._running and self._skipped is None:
            try:
                self.at(COUNTED if self._counts.is_running else REDUCTION)
                self._begin_tally()
            except SkippedError as error:  # DDP comes to the end of its backward pass, or it is of no use any more
                self._skipped = error
        if self._skipped is not None:
            result = torch.futures.Future(devices=[bucket.buffer().device] if bucket.buffer().is_cuda else None)
            result.set_result(bucket.buffer())
            return result
        weight = self.weight
        # padding may overflow in half precision, and 0 times infinity is no 0
        buffer = bucket.buffer().mul_(weight) if weight else bucket.buffer().zero_()
        if self._kept is not None:
            self._add_kept(bucket, self._kept)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        if self.ends_early and work.is_completed():
            work.wait()  # raises if it has failed: the rest of the backward pass would be for nothing
        result = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._running.append((work, buffer, result))
        if bucket.is_last():
            self._hand_out()
        return result

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _begin_tally(self) -> None:
        """Beside the first bucket, and waited for with the last one: 32 bytes, where losses have ever had counts."""
        if not self._counts.are_used:
            self._counts.found_plain()
            return
        mine = self._counts.tally(None if self._kept is None else self._kept.tally)
        row = torch.tensor(mine.row(), dtype=torch.float64, device=message_device())
        work = dist.all_reduce(row, async_op=True)
        assert work is not None
        self._tally = work, row

    def _add_kept(self, bucket: GradBucket, kept: KeptSums) -> None:
        scale = 1.0 / self._sampler.pending[0].global_samples if kept.count is None else 1.0
        of = {id(parameter): extra for parameter, extra in zip(self._parameters(), kept.sums, strict=True)}
        for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            extra = of[id(parameter)]
            if extra is not None:
                view.add_(extra, alpha=scale)

    def _hand_out(self) -> None:
        self._begun += 1
        for work, _, _ in self._running:
            work.wait()
        if self._tally is not None:
            self._tally[0].wait()
        wait_for_collectives()
        factor = 1.0 if self._tally is None else self._counts.settle(Tally.of_row(self._tally[1].tolist()))
        for _, buffer, result in self._running:
            result.set_result(buffer if factor == 1.0 else buffer.mul_(factor))
        self._running.clear()
        self._tally = None
        self._done += 1

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_running": [],
            "_tally": None,
            "_kept": None,
            "_wrapped": [],
        }  # of a step and a group under way
