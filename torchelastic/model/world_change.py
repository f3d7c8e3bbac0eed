"""What the user's code does when the number of workers changes: callbacks, and the two that most jobs want.

With an `ElasticBatchSampler` the global batch stays the same whatever the world size, and nothing here is needed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic.model.one_or_many import OneOrMany
from torchelastic.processes.script_reads import reads_of
from torchelastic.text import shortlist

log = logging.getLogger(__name__)

RULES = ("linear", "sqrt")
_VARIABLE = "WORLD_SIZE"


@dataclass(frozen=True)
class WorldChange:
    """A change of the group, as one of its members sees it.

    Attributes:
        before: world size of this process's last group; 0 if this is its first.
        now: world size.
        rank: of this process in the new group.
    """

    before: int
    now: int
    rank: int


class WorldWatch:
    """The callbacks of one process, called when it finds itself in a group of another size than before."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[WorldChange], Any]] = []
        self._before = 0
        self._has_warned = False

    def add(self, callback: Callable[[WorldChange], Any]) -> None:
        """Call this one too from now on."""
        self._callbacks.append(callback)

    def changed(self, now: int, rank: int) -> None:
        """Call all if the size has changed. What one raises is raised; then all are called again next time."""
        if now != self._before:
            for callback in self._callbacks:
                callback(WorldChange(self._before, now, rank))
            self._say_if_script_goes_by_the_first(now, rank)
            self._before = now

    def _say_if_script_goes_by_the_first(self, now: int, rank: int) -> None:
        """Warn, on rank 0 and once, where the script reads a WORLD_SIZE that is not that of the group."""
        said = os.environ.get(_VARIABLE, "")
        if self._has_warned or rank or not said.isdecimal() or int(said) == now:
            return
        self._has_warned = True
        places = reads_of(_VARIABLE)
        if places:
            log.warning(
                "%s reads %s, which is %s since the start, and there are %d workers now: what goes by it (a loss, a "
                "learning rate) changes when workers are lost or join. Use coordinator.world_size; a loss that is a "
                "mean over samples needs no such factor, and others go to state.backward(loss_sum, count) "
                "(docs/data.md)",
                shortlist(places), _VARIABLE, said, now,
            )  # fmt: skip


# --- learning rate ----------------------------------------------------------------------------------------------------


def learning_rate_factor(rule: str, world_size: int, base_world_size: int) -> float:
    """By how much a learning rate grows with the number of workers. Pure.

    Args:
        rule: "linear" (Goyal et al. 2017, arXiv:1706.02677) or "sqrt" (Krizhevsky 2014, arXiv:1404.5997).
        world_size: workers now.
        base_world_size: workers for which the learning rate was chosen.

    Raises:
        ValueError: an unknown rule, or a size below 1.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not one of {', '.join(RULES)}")
    if world_size < 1 or base_world_size < 1:
        raise ValueError(f"world sizes start at 1, got world_size={world_size}, base_world_size={base_world_size}")
    ratio = world_size / base_world_size
    return ratio if rule == "linear" else math.sqrt(ratio)


class LearningRateScale:
    """Scales the learning rates while the optimizer steps, and at no other time; see `scale_learning_rate`.

    Attributes:
        factor: what learning rates are multiplied by in the present group.
    """

    def __init__(self, optimizer: Any, rule: str, base_world_size: int) -> None:
        learning_rate_factor(rule, 1, base_world_size)  # refuse nonsense now and not at the first change
        self._rule, self._base_world_size = rule, base_world_size
        self._unscaled: dict[int, list[Any]] = {}
        self.factor = 1.0
        for each in OneOrMany("optimizer", optimizer).objects:
            each.register_step_pre_hook(self._scale)
            each.register_step_post_hook(self._unscale)

    def __call__(self, change: WorldChange) -> None:
        """Take the factor of the new group."""
        self.factor = learning_rate_factor(self._rule, change.now, self._base_world_size)
        log.info("%d workers: learning rates are multiplied by %g", change.now, self.factor)

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._unscaled[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _unscale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, unscaled in zip(optimizer.param_groups, self._unscaled.pop(id(optimizer)), strict=True):
            group["lr"] = unscaled


def scale_learning_rate(optimizer: Any, *, rule: str = "linear", base_world_size: int) -> LearningRateScale:
    """A callback for `ModelState.on_world_change` that scales the learning rate with the number of workers.

    For jobs whose global batch grows with the number of workers. The rate that the optimizer, the scheduler, your log,
    a newcomer and a checkpoint hold stays the one for `base_world_size`: it is multiplied when the optimizer begins its
    step and put back when that has ended. So nothing compounds, whatever is loaded, undone or scheduled.

    Args:
        optimizer: one, or a list, a tuple or a dict of them.
        rule: "linear" or "sqrt", see `learning_rate_factor`.
        base_world_size: workers for which the learning rate was chosen.

    Raises:
        ValueError: an unknown rule, or a size below 1.
    """
    return LearningRateScale(optimizer, rule, base_world_size)


# --- global batch -----------------------------------------------------------------------------------------------------


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """How many micro batches each worker takes per step, so that all together come nearest to the global batch. Pure.

    At least one. Halves round up.

    Raises:
        ValueError: a size below 1.
    """
    if min(global_batch_size, micro_batch_size, world_size) < 1:
        raise ValueError(f"sizes start at 1, got {global_batch_size}, {micro_batch_size} and {world_size}")
    each = micro_batch_size * world_size
    return max(1, (2 * global_batch_size + each) // (2 * each))


class GlobalBatch:
    """Keeps the global batch by accumulating gradients; see `keep_global_batch`.

    Attributes:
        steps: micro batches of each worker in one train step, in the present group.
        samples: what that makes over all workers.
    """

    def __init__(self, global_batch_size: int, micro_batch_size: int) -> None:
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._take(1)

    def __call__(self, change: WorldChange) -> None:
        """Take the number of the new group."""
        self._take(change.now)
        log.info("%d workers: %d micro batches each, %d samples in a step", change.now, self.steps, self.samples)
        if self.samples != self._global_batch_size:
            log.warning(
                "%d workers cannot make a global batch of %d out of micro batches of %d: it is %d",
                change.now,
                self._global_batch_size,
                self._micro_batch_size,
                self.samples,
            )

    def _take(self, world_size: int) -> None:
        self.steps = accumulation_steps(self._global_batch_size, self._micro_batch_size, world_size)
        self.samples = self.steps * self._micro_batch_size * world_size


def keep_global_batch(global_batch_size: int, micro_batch_size: int) -> GlobalBatch:
    """A callback for `ModelState.on_world_change` that says how many micro batches to accumulate in one train step.

    For jobs with a sampler of their own; an `ElasticBatchSampler` keeps the global batch by itself, exactly.

    Args:
        global_batch_size: samples per step over all workers.
        micro_batch_size: samples per forward pass of one worker.

    Raises:
        ValueError: a size below 1.
    """
    return GlobalBatch(global_batch_size, micro_batch_size)
