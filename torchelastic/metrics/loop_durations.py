"""How long the parts of a train loop take, under the names of torchelastic 0.1."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchelastic.loop_observer import LoopObserver
from torchelastic.metrics.api import get_elapsed_time_ms, publish_metric

if TYPE_CHECKING:
    from torchelastic.state import State


class LoopDurations(LoopObserver):
    """Publishes them. A part that ends with an error is not published, except for a train step."""

    def __init__(self) -> None:
        self._loop_s = self._group_s = self._sync_s = self._step_s = time.monotonic()

    def sync_begins(self) -> None:
        """See `LoopObserver`."""
        self._sync_s = time.monotonic()

    def in_sync(self, state: State) -> None:  # noqa: ARG002 - part of the contract
        """See `LoopObserver`."""
        publish_metric("torchelastic", "state_sync.duration.ms", get_elapsed_time_ms(self._sync_s))
        self._group_s = time.monotonic()

    def step_begins(self) -> None:
        """See `LoopObserver`."""
        self._step_s = time.monotonic()

    def step_ends(self) -> None:
        """See `LoopObserver`."""
        publish_metric("torchelastic", "train_step.duration.ms", get_elapsed_time_ms(self._step_s))

    def group_left(self) -> None:
        """See `LoopObserver`."""
        publish_metric("torchelastic", "inner_train_loop.duration.ms", get_elapsed_time_ms(self._group_s))

    def returns(self, *, has_left: bool) -> None:  # noqa: ARG002 - as above
        """See `LoopObserver`."""
        publish_metric("torchelastic", "outer_train_loop.duration.ms", get_elapsed_time_ms(self._loop_s))
