"""Agreement of all ranks to leave a group at the same step, or on a near deadline, without waiting for each other.

A tiny all-reduce is started at the end of one step and read at the end of a later one, so no rank waits for it; its
result is the same on every rank, so all act on it at the same step. For very short steps it is done only every n-th
step, so that it costs at most a fraction of the time; n is agreed on by the same all-reduce.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchelastic.lifetime.sample import MAX_DELAY_S, MAX_SHARE, interval_steps
from torchelastic.p2p.replica_watch import ReplicaWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.state import State

__all__ = ["MAX_DELAY_S", "MAX_SHARE", "StepAgreement", "interval_steps"]


class StepAgreement:
    """Agrees on whether to leave the group; one object per group, used on the training thread of every rank.

    Args:
        group: a group for CPU tensors; None: this worker is alone.
        clock: monotonic seconds.
    """

    def __init__(self, group: dist.ProcessGroup | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._group = group
        self._clock = clock
        self._steps = 0
        self._next_at = 1
        self._pending: dist.Work | None = None
        self._words = torch.zeros(0, dtype=torch.int64)
        self._replicas = ReplicaWatch(clock)
        self._own_is_near = self._is_near = False
        self._step_s = 0.0
        self._cost_s = 0.0
        self._last_s = clock()

    def deadline_is_near(self, own: bool) -> bool:
        """Called after each step, before `leave`: whether the deadline of any rank is near, as soon as all know.

        Args:
            own: whether that of this rank is.
        """
        self._own_is_near = own
        return own if self._group is None else self._is_near

    def leave(self, wish: bool, state: State) -> bool:
        """Called after each step by every rank; true on all of them at the same step, soon after one has wished it.

        Args:
            wish: whether this rank wants to leave.
            state: whose replicas are compared now and then; it is told the result.

        Raises:
            RuntimeError: a peer is lost.
            Exception: what `State.end_replica_comparison` raises.
        """
        if self._group is None:
            return wish
        self._steps += 1
        if self._steps < self._next_at:
            return False
        began_s = self._clock()
        leave, interval = False, 1
        if self._pending is not None:
            self._pending.wait()
            leave_word, interval, near_word, *digests = self._words.tolist()
            leave, self._is_near = bool(leave_word), bool(near_word)
            verdict = self._replicas.read(digests)
            if verdict is not None:
                state.end_replica_comparison(are_equal=verdict.are_equal, draw_alike=verdict.draw_alike)
        self._next_at = self._steps + interval
        if not leave:
            self._start(wish, began_s, interval, state)
        return leave

    def _start(self, wish: bool, began_s: float, interval: int, state: State) -> None:
        steps = interval_steps(self._step_s, self._cost_s) if self._step_s else 1
        before_s = self._clock()
        digests = self._replicas.words(state, self._step_s * interval)
        digests_s = self._clock() - before_s  # has a budget of its own
        self._words = torch.tensor([wish, steps, self._own_is_near, *digests], dtype=torch.int64)
        self._pending = dist.all_reduce(self._words, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        now_s = self._clock()
        # smoothed: one slow step must not change how often the ranks exchange
        self._step_s += 0.2 * ((began_s - self._last_s) / interval - self._step_s)
        self._cost_s += 0.2 * ((now_s - began_s - digests_s) - self._cost_s)
        self._last_s = now_s
