"""Losses that are sums: by what their gradients are divided, a count over the whole global batch.

A mean over samples needs none of this: each rank's counts by its samples. A mean over tokens, or any sum, is divided by
a number that no rank knows alone. So each gives its sum and its count (`ModelState.backward`), and what is reduced is
divided by the sum of the counts. All calls up to an optimizer's beginning are one *window*, with one divisor.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchelastic.errors import UnfitError

#: On so many parameters it is watched whether another backward pass than `state.backward` gives them gradients.
_WATCHED = 8

MIXED = (
    "gradients come from state.backward() and from another backward() before one optimizer.step(), or from one on this "
    "rank and from the other on another: use the same for all losses of a step, on all ranks"
)


@dataclass(frozen=True)
class Tally:
    """What is known of the losses of some ranks, or of some logical shards.

    Attributes:
        count: the sum of the counts.
        counted: how many have given one.
        plain: how many have given none: their loss is a mean.
        wrong: how many have given one that is no number from 0 up, or have mixed the two.
    """

    count: float = 0.0
    counted: int = 0
    plain: int = 0
    wrong: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.count + other.count,
            self.counted + other.counted,
            self.plain + other.plain,
            self.wrong + other.wrong,
        )

    def row(self) -> list[float]:
        """As numbers that are summed over the ranks."""
        return [self.count, self.counted, self.plain, self.wrong]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Tally:
        """The inverse."""
        count, *numbers = row
        return cls(count, *(int(number) for number in numbers))

    def divisor(self, before: float = 0.0, why: str = "") -> float | None:
        """By what the sum of the gradients is divided; None: they are means, which are weighted already.

        Args:
            before: the count of what they are added to.
            why: what is wrong on this rank.

        Raises:
            UnfitError: the losses are of both kinds, or their count is none.

        >>> Tally(12.0, counted=1).plus(Tally(8.0, counted=1)).divisor()
        20.0
        >>> Tally(plain=2).divisor()
        """
        if self.counted and (self.plain or self.wrong):
            raise UnfitError(why or (MIXED if self.plain else "state.backward() got a wrong count on another rank"))
        if self.wrong:
            raise UnfitError(why or MIXED)
        if not self.counted:
            return None
        if not 0.0 < before + self.count < math.inf:
            raise UnfitError(
                f"state.backward() divides by the count of the global batch, and that is {self.count:g}: give the "
                "number of what the loss is the sum of (tokens that are no padding), and train no batch without any"
            )
        return self.count


@dataclass(frozen=True)
class EarlierGradients:
    """Gradients of a window of which some were divided before the last call: by another count.

    Attributes:
        gradients: what was there.
        count: by which it was divided.
    """

    gradients: tuple[tuple[torch.nn.Parameter, torch.Tensor], ...] = ()
    count: float = 0.0

    @classmethod
    def of(cls, parameters: Iterable[torch.nn.Parameter], count: float) -> EarlierGradients:
        """Take them off the parameters."""
        found = tuple((one, one.grad) for one in parameters if one.grad is not None)
        for parameter, _ in found:
            parameter.grad = None
        return cls(found, count)

    @torch.no_grad()
    def put_together(self, count: float) -> float:
        """Make one mean of these and of what has come since, which was divided by `count`; returns the other count."""
        for parameter, before in self.gradients:
            if parameter.grad is not None:
                weight = count / (self.count + count)
                before = before.detach().mul_(1.0 - weight).add_(parameter.grad, alpha=weight)
            parameter.grad = before
        return self.count


class LossCounts:
    """The counts of one rank, window by window; on the training thread.

    Args:
        sampler: the user's; knows which batches are padding, of which nothing counts.

    Attributes:
        are_used: whether any step has given a count; the same on all ranks of a group when it begins.
        rank: of this process, for messages.
        scale: by what this rank's losses were divided beforehand, in this window: near to the count, so that gradients
            are as large as those of a mean, in half precision too.
        own: this rank's count.
        total: that of all ranks, by which the gradients are divided; 0: they are not yet.
        is_running: whether a call of `state.backward` is under way.
        error: what was found when all counts were there.
    """

    def __init__(self, sampler: Any) -> None:
        self.are_used = self.is_running = False
        self.rank = 0
        self._sampler = sampler
        self._hooks: list[Any] = []
        self.begin_step()

    def begin_step(self) -> None:
        """A step (or another attempt at one) begins."""
        self._calls = 0
        self.begin_window()

    def begin_window(self) -> None:
        """An optimizer has begun, or a logical shard begins."""
        self.scale, self.own, self.total = 1.0, 0.0, 0.0
        self.is_divided = self._is_counted = self._is_plain = False
        self._earlier = EarlierGradients()
        self._wrong = ""
        self.error: UnfitError | None = None

    @property
    def are_used_in_step(self) -> bool:
        """Whether this step has given any."""
        return self._calls > 0

    @property
    def is_counted(self) -> bool:
        """Whether this window's gradients are sums, with a count."""
        return self._is_counted

    @property
    def why(self) -> str:
        """What is wrong on this rank; empty: nothing."""
        return self._wrong and f"rank {self.rank}: {self._wrong}"

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note when some of these get gradients outside of `state.backward`, from now on."""
        self.unwatch()
        wanted = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
        every = max(1, len(wanted) // _WATCHED)
        self._hooks = [_hook(one, self._accumulated) for one in wanted[::every]]

    def unwatch(self) -> None:
        """Take those hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _accumulated(self, _parameter: torch.Tensor) -> None:
        if not self.is_running:
            self.found_plain()

    def found_plain(self) -> None:
        """There was a backward pass outside of `state.backward`."""
        self._is_plain = True
        if self._is_counted:
            self._wrong = self._wrong or MIXED

    def add(self, loss_sum: Any, count: Any, *, beforehand: Callable[[float], float] | None = None) -> torch.Tensor:
        """A call of `state.backward` begins: note its count.

        Args:
            loss_sum: as the user gave it.
            count: the same.
            beforehand: by what the losses of a window are divided, given its first count; None: `power_of_two`.

        Returns:
            Of what the gradients are computed.

        Raises:
            UnfitError: one of both is of another kind.
        """
        loss, number = _loss(loss_sum), _number(count)
        if self._is_padding():
            number = 0.0
        self._calls += 1
        self.are_used = True
        if not 0.0 <= number < math.inf:
            self._wrong = self._wrong or f"state.backward() got the count {number:g}: it is a number from 0 up"
            number = 0.0
        if self._is_plain:
            self._wrong = self._wrong or MIXED
        if number and not self.own:
            self.scale = (beforehand or power_of_two)(number)
        self._is_counted = True
        self.own += number
        return loss / self.scale if number else loss * 0.0  # nothing of a batch that is padding counts

    def _is_padding(self) -> bool:
        if not getattr(self._sampler, "counts_padding", True):
            return False  # whoever calls gives it the count 0
        pending = getattr(self._sampler, "pending", ())
        are_empty = [not getattr(share, "local_samples", 1) for share in pending]
        if not any(are_empty) or all(are_empty):
            return any(are_empty)
        if self._calls >= len(are_empty):
            raise UnfitError(
                f"rank {self.rank}: a step has drawn {len(are_empty)} global batches, this rank has no part of some, "
                "and state.backward() is called more often than that: draw one global batch in a step, or call it once "
                "for each"
            )
        return are_empty[self._calls]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the backward pass of a call."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def raise_error(self) -> None:
        """Raise what was found when all counts were there."""
        if self.error is not None:
            raise self.error

    def set_aside(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A call begins: what an earlier one of this window has divided already is no part of what it divides."""
        if self.is_divided:
            self._earlier = EarlierGradients.of(parameters, self.total)
            self.scale, self.own, self.total, self.is_divided = 1.0, 0.0, 0.0, False

    def put_together(self) -> None:
        """The gradients of a call are divided: add those that were set aside."""
        self.total += self._earlier.put_together(self.total)
        self._earlier = EarlierGradients()

    def tally(self, kept: Tally | None = None) -> Tally:
        """What this rank contributes to the divisor of the reduction that begins.

        Args:
            kept: of gradients of an earlier attempt, which it brings along; None: there are none.
        """
        if not self.is_running:
            self.found_plain()
        mine = Tally(self.own, int(self.is_running), int(not self.is_running), int(bool(self._wrong)))
        if kept is None:
            return mine
        if self.is_running != bool(kept.counted):
            self._wrong = self._wrong or MIXED
            return replace(mine, wrong=1)
        return replace(mine, count=mine.count + kept.count)

    def tally_of_shard(self) -> Tally:
        """The same of a logical shard, which is a window of its own."""
        return Tally(self.own, int(self._is_counted), int(not self._is_counted), int(bool(self._wrong)))

    def settle(self, tally: Tally) -> float:
        """Take the tally of all ranks; returns by what the sum of their gradients is multiplied."""
        try:
            divisor = tally.divisor(self._earlier.count, self.why)
        except UnfitError as error:
            self.error = error
            return 1.0
        if divisor is None:
            return 1.0
        self.total, self.is_divided = divisor, True
        return 1.0 / (divisor or 1.0)  # or there are none

    def optimizer_begins(self) -> None:
        """Asked before any optimizer steps; the window is over.

        Raises:
            UnfitError: the gradients are not what `state.backward` promises.
        """
        self.raise_error()
        if self._is_counted and (self._wrong or not self.is_divided):
            raise UnfitError(
                self.why
                or f"rank {self.rank} steps its optimizer, and the last state.backward() before that was "
                "under no_sync(): put all but the last there"
            )
        self.begin_window()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": [], "_earlier": EarlierGradients()}  # of this process's parameters


def power_of_two(count: float) -> float:
    """Near to a count, and exact as a divisor.

    >>> [power_of_two(count) for count in (1, 37, 0.3)]
    [1.0, 32.0, 0.25]
    """
    return float(2.0 ** math.floor(math.log2(count)))


def all_at_once(count: float) -> float:
    """Of a window that is a single call, on a single rank."""
    return count


def nothing(_count: float) -> float:
    """Where the ranks' losses have to be divided by the same."""
    return 1.0


def _hook(parameter: Any, accumulated: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(accumulated)


def _loss(loss_sum: Any) -> torch.Tensor:
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1 or not loss_sum.requires_grad:
        what = (
            f"one of shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        )
        raise UnfitError(
            f"state.backward(loss_sum, count) got a loss that is {what}: give the sum as a tensor of one number, as it "
            "was computed of what state.model returns"
        )
    return loss_sum


def _number(count: Any) -> float:
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if not isinstance(count, numbers.Real):
        raise UnfitError(
            f"state.backward(loss_sum, count) got a count that is a {type(count).__name__}: give one number, such as "
            "int((targets != -100).sum())"
        )
    return float(count)
