"""A script that trains and saves; how it hears of SIGTERM is its first argument. Saves take 0.3 s.

Run as `python sigterm_job.py WAY FOLDER`. It writes the steps that are done into `done`, and what is saved into `saved`
or `checkpoints`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torchelastic
from tests.pure.worlds_of_one import Counter, World
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.lifetime import IterManager

STEP_S, SAVE_S = 0.02, 0.3


def done(folder: Path, step: int) -> None:
    partial = folder / ".done"
    partial.write_text(str(step))
    partial.replace(folder / "done")


def managed(folder: Path) -> None:
    """As docs/lifetime.md has it."""
    step = 0
    manager = IterManager(velastic_dir=folder / ".velastic")
    while True:
        manager.iter()
        if manager.should_save_ckpt():
            with manager.saving():
                time.sleep(SAVE_S)
                (folder / ".saved").write_text(str(step))
                (folder / ".saved").replace(folder / "saved")
        if manager.should_stop:
            break
        time.sleep(STEP_S)
        step += 1
        done(folder, step)
    sys.exit(manager.exit_code)


class SlowCounter(Counter):
    """Its saves take a while; the newest one is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save(self, stream: Any) -> None:
        time.sleep(SAVE_S)
        super().save(stream)


def train(folder: Path) -> None:
    """`torchelastic.train(lifetime=)`, with a coordinator that leaves signals alone."""

    def train_step(state: SlowCounter) -> None:
        time.sleep(STEP_S)
        state.step += 1
        done(folder, state.step)

    manager = FileSystemCheckpointManager(str(folder / "checkpoints"))
    torchelastic.train(World(), train_step, SlowCounter(folder), checkpoint=manager, lifetime="auto")


if __name__ == "__main__":
    {"managed": managed, "train": train}[sys.argv[1]](Path(sys.argv[2]))
