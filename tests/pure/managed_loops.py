"""A loop with an `IterManager` on a clock that moves when it is told to; for test_lifetime_iter_manager*.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchelastic.lifetime import Deadline, IterManager, nearest, time_limit_s
from torchelastic.testing.clock import FakeClock

START_S = 1000.0


class Job:
    """A loop, as the seed has it, that stops when it is told to."""

    def __init__(self, folder: Path, deadline: Deadline | float | None, **options: Any) -> None:
        self.clock = FakeClock(START_S)
        if isinstance(deadline, float):
            deadline = time_limit_s(deadline, began_s=START_S)
        self.manager = IterManager(
            velastic_dir=folder, deadline=nearest([deadline]), clock=self.clock, **{"redundant_time": 0, **options}
        )
        self.saved_at: list[int] = []  # to stop; those after which it goes on:
        self.went_on_at: list[int] = []
        self.saved_s: list[float] = []

    def run(self, step_s: Sequence[float] | float, steps: int = 1000, save_s: float = 2.0) -> None:
        times = iter([step_s] * steps if isinstance(step_s, float) else step_s)
        for took_s in times:
            self.manager.iter()
            if self.manager.should_save_ckpt():
                with self.manager.saving():
                    self.clock.advance(save_s)
                if self.manager.should_stop:
                    self.saved_at.append(self.manager.iter_count)
                    self.saved_s.append(self.clock() - START_S)
                else:
                    self.went_on_at.append(self.manager.iter_count)
            if self.manager.should_stop:
                return
            self.clock.advance(took_s)

    def run_until_killed(self, took_s: Callable[[int], float], done: int, life_s: float) -> tuple[int, bool]:
        """Until it stops, or its life is over in an iteration; what is saved then of its iterations, and which it was.

        Args:
            took_s: seconds of each iteration.
            done: iterations of the lives before.
            life_s: of this one.
        """
        saved = done
        while self.clock() - START_S <= life_s:
            self.manager.iter()
            if self.manager.should_save_ckpt():
                with self.manager.saving():
                    self.clock.advance(2.0)
                saved = done
            if self.manager.should_stop:
                return saved, False
            self.clock.advance(took_s(done))
            done += 1
        return saved, True

    def run_into_save(self, step_s: float, error: Exception | None = None) -> None:
        """Until it is killed in the last save, or that fails."""
        while not (self.manager.should_save_ckpt() and self.manager.should_stop):
            self.clock.advance(step_s)
            self.manager.iter()
        self._unfinished = self.manager.saving()  # kept: if it was deleted it would end
        self._unfinished.__enter__()
        if error is not None:
            self._unfinished.__exit__(type(error), error, None)
