"""The losses of all steps as a CSV file that survives restarts: one line per step, in full precision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

HEADER = "step,loss"


class LossLog:
    """Written by rank 0.

    Args:
        path: the file.
        done: steps of earlier lives that count; lines of later steps are removed, since they are trained again.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        kept = [f"{step},{loss!r}" for step, loss in read_losses(path).items() if step <= done]
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text("\n".join([HEADER, *kept, ""]))
        scratch.replace(path)

    def add(self, first_step: int, losses: Sequence[float]) -> None:
        """Appends the losses of consecutive steps."""
        with self.path.open("a") as file:
            file.writelines(f"{step},{loss!r}\n" for step, loss in enumerate(losses, start=first_step))


def read_losses(path: Path) -> dict[int, float]:
    """The losses by step; a last line that was torn is passed over. Empty if there is no file."""
    losses = {}
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    for line in lines:
        step, _, loss = line.partition(",")
        try:
            losses[int(step)] = float(loss)
        except ValueError:
            continue
    return losses
