"""What rank 0 tells a person: a progress bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_COLUMNS = "[bold]{task.fields[workers]} worker(s)[/]  epoch {task.fields[epoch]}"
_NUMBERS = "loss {task.fields[loss]:.3f}  top-1 {task.fields[accuracy]}  {task.fields[rate]:.0f} img/s"


class RunDisplay:
    """Shows only what has been committed, on whichever worker has rank 0 at the moment.

    Args:
        total_steps: steps of the whole run.
        bar: whether to draw a bar where the output is a terminal.
    """

    def __init__(self, total_steps: int, *, bar: bool) -> None:
        self._console = Console(highlight=False)
        self._total_steps = total_steps
        self._draws_bar = bar and self._console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._rank = -1
        self._world_size = 0
        self._accuracy = "-"
        self._last_commit_s: float | None = None
        self._images_per_s = 0.0

    def formed(self, *, rank: int, world_size: int, step: int) -> None:
        """A group is ready; ``step`` steps are committed so far."""
        self.close()
        self._rank, self._world_size = rank, world_size
        self._last_commit_s = None  # the time in between was not spent on a step
        if rank == 0:
            self._console.print(f"group of {world_size} worker(s) at step {step} of {self._total_steps}")
            if self._draws_bar:
                self._open_bar(step)

    def committed(self, *, step: int, epoch: int, loss: float, images: int) -> None:
        """``step`` steps are committed now, the last one over ``images`` images of all workers together."""
        now_s = time.monotonic()
        if self._last_commit_s is not None:
            rate = images / max(now_s - self._last_commit_s, 1e-9)
            # A moving average over about ten steps: one slow step should not make the number jump.
            self._images_per_s = rate if self._images_per_s == 0 else 0.9 * self._images_per_s + 0.1 * rate
        self._last_commit_s = now_s
        if self._progress is not None:
            self._progress.update(
                self._task, completed=step, epoch=epoch, loss=loss, accuracy=self._accuracy, rate=self._images_per_s
            )

    def validated(self, *, epoch: int, step: int, top1: float, top5: float) -> None:
        """The model after ``epoch`` (from 0) was measured; accuracies are 0..1."""
        self._accuracy = f"{100 * top1:.1f} %"
        if self._rank == 0:
            self._console.print(
                f"epoch {epoch}: top-1 {100 * top1:.2f} %, top-5 {100 * top5:.2f} %, step {step}, "
                f"{self._world_size} worker(s), {self._images_per_s:.0f} img/s"
            )

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open_bar(self, step: int) -> None:
        self._progress = Progress(
            TextColumn(_COLUMNS),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(_NUMBERS),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "train",
            total=self._total_steps,
            completed=step,
            workers=self._world_size,
            epoch="-",
            loss=float("nan"),
            accuracy=self._accuracy,
            rate=0.0,
        )
        self._progress.start()
