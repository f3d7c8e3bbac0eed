"""What workers do in the tests of the asynchronous queue; a module of its own, so that it is quickly imported."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 90.0


def wait_for(path: Path) -> str:
    """The content of a file that another process writes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline_s, f"{path} was not written"
        time.sleep(0.005)
    return path.read_text().strip()


def write(path: Path, text: object) -> None:
    path.write_text(f"{text}\n")


def note_sum(tensor: torch.Tensor, path: Path, after: Path | None = None) -> None:
    if after is not None:
        wait_for(after)
    write(path, float(tensor.sum()))


def note_whereabouts(path: Path) -> None:
    write(path, f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)} {signal.getsignal(signal.SIGINT).name}")  # type: ignore[union-attr]


def note_staged(label: str, staged: Any, path: Path) -> None:
    write(path, f"{label} {staged} {os.getpid()}")


def stage(path: Path) -> int:
    write(path, "staged")
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def hang(path: Path, ignore_sigterm: bool = False) -> None:
    if ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(path, os.getpid())
    time.sleep(600)


def leave(code: int) -> None:
    sys.exit(code)


def leave_later(code: int) -> None:
    atexit.register(os._exit, code)  # the work is done, and then the process fails to end well
