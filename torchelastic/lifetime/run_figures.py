"""The figures of an `IterManager`: what it has measured, and what it expects."""

from __future__ import annotations

import math
from pathlib import Path

from torchelastic.lifetime.group_monitor import GroupMonitor
from torchelastic.lifetime.iteration_times import Forecast, IterationTimes
from torchelastic.lifetime.manager_state import FILE_NAME, ManagerState, SaveTimes
from torchelastic.lifetime.progress import LifetimeSummary


class RunFigures:
    """The figures of a run, which `IterManager` measures.

    Attributes:
        total_iters: of the run; -1: not known.
        velastic_dir: folder of the state file.
        given_up_s: seconds that were left when the save before the deadline was done; None: not yet.
    """

    total_iters: int
    velastic_dir: Path
    given_up_s: float | None = None
    _times: IterationTimes
    _saves: SaveTimes
    _monitor: GroupMonitor
    _confidence: float
    _iter_count = 0  # the iteration that has begun, over all incarnations
    _calls = 0  # of `iter`, in this one

    @property
    def velastic_state_path(self) -> Path:
        """The file with the state for the next incarnation of the job."""
        return self.velastic_dir / FILE_NAME

    @property
    def iter_times(self) -> tuple[float, ...]:
        """The iterations that count, in seconds, oldest first."""
        return self._times.recent_s

    @property
    def avg_iter_time(self) -> float:
        """Seconds of a usual iteration: the mean of the newest, without pauses and without the first; 0: not known."""
        return self._times.average_s()

    @property
    def max_iter_time(self) -> float:
        """Seconds of the longest of the newest iterations, without the first; 0: not known."""
        return self._times.longest_s

    @property
    def remaining_time(self) -> float | None:
        """Seconds that the rest of the run is expected to take; None: not known."""
        if self.total_iters <= 0 or not self._times.recent_s:
            return None
        return self._times.forecast(max(0, self.total_iters - self._done())).seconds

    def forecast(self, iterations: int) -> Forecast:
        """What the next iterations will take, pauses that are due among them; ValueError if they are negative."""
        return self._times.forecast(iterations, self._confidence)

    @property
    def save_ckpt_time(self) -> float:
        """Seconds to leave for a save into the most durable tier."""
        return self._monitor.tiers()[0].bound.seconds

    def summary(self) -> LifetimeSummary:
        """What has been seen so far; `print` it."""
        decision = self._monitor.decision
        saves = self._saves.times_s.items()
        return LifetimeSummary(
            iterations=self._done(),
            total_iters=self.total_iters,
            avg_iter_s=self.avg_iter_time,
            max_iter_s=self.max_iter_time,
            first_iters_s=self._times.set_apart,
            forecast_s=self.remaining_time,
            saves=tuple((tier, len(times), max(times, default=0.0)) for tier, times in saves),
            deadline=self._monitor.deadline_text(),
            remaining_s=self._left_s(),
            decision="" if decision is None or not decision.stops else str(decision),
            given_up_s=self.given_up_s,
        )

    def _left_s(self) -> float | None:
        """Seconds until the deadline; None: none is known."""
        left_s = self._monitor.remaining_s()
        return None if left_s == math.inf else left_s

    def _done(self) -> int:
        """Iterations of the run that are done: the present one is not."""
        return self._iter_count - 1 if self._calls else self._iter_count

    def _state(self) -> ManagerState:
        remaining_s, bound = self.remaining_time, self._monitor.step_bound()
        return ManagerState(
            avg_iter_time=self.avg_iter_time,
            total_iters=self.total_iters,
            iter_count=self._iter_count,
            remaining_time=-1.0 if remaining_s is None else remaining_s,
            save_ckpt_time=self.save_ckpt_time,
            completed_iters=self._done(),
            iter_bound_s=0.0 if bound is None else bound.seconds,
            world_size=self._monitor.agree.world_size,
            save_times_s=self._saves.times_s,
            is_step_tried=self._monitor.is_step_tried,
            iter_times_s=tuple(round(seconds, 6) for seconds in self._times.known_s),
        )
