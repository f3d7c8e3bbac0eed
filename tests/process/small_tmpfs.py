"""A disk that is full soon: a tmpfs of some size, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount one; where that is impossible the test is skipped, with the reason.

    Args:
        folder: made, and mounted on.
        size_bytes: so much goes into it.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs ({done.stderr.strip()}): run `sudo make test`")
    try:
        yield folder
    finally:
        while os.path.ismount(folder):
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
