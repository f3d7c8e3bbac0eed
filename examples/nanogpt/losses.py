"""The losses of all iterations in one file, which a life that resumes continues as if nothing had happened.

One line of JSON each, in the order of the iterations; that of an evaluation comes before the iteration it precedes:

    {"iteration": 250, "train_loss": 2.31, "val_loss": 2.35}
    {"iteration": 250, "loss": 2.29, "learning_rate": 0.001}

Numbers are written so that they are read back to the bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "losses.jsonl"

Record = Mapping[str, Any]


def kept(data: bytes, before: int) -> bytes:
    """The whole lines of a file that are of iterations before this one. Pure.

    What follows the first other line goes: it is of a life whose work was not saved, or was torn when that was killed.
    """
    end = 0
    for line in data.splitlines(keepends=True):
        try:
            iteration = json.loads(line)["iteration"] if line.endswith(b"\n") else before
        except (ValueError, KeyError, TypeError):
            break
        if iteration >= before:
            break
        end += len(line)
    return data[:end]


class LossFile:
    """Appends to the file; on one rank.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def cut(self, before: int) -> None:
        """Keep the iterations before this one. Called when a life begins."""
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.truncate(len(kept(file.read(), before)))

    def append(self, records: Iterable[Record]) -> None:
        """Write these behind the others."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in records)

    def sync(self) -> None:
        """Returns when what was written is on the disk: before a checkpoint that does not hold it."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def read_losses(folder: Path) -> list[Record]:
    """What is in the file, oldest first; empty if there is none. Raises ValueError: a line is torn."""
    path = folder / FILE_NAME
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
