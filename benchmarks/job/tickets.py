"""Permissions that a benchmark hands out to the workers of its job one by one, as files in a folder that they share."""

from __future__ import annotations

import time
from pathlib import Path

#: How often a worker without a ticket looks for one. Those that have imported nothing yet are in no hurry.
POLL_S = {"import": 0.2, "join": 0.01}


def issue(folder: Path, kind: str, first: int, count: int) -> None:
    """Hand out the tickets with these numbers."""
    for number in range(first, first + count):
        (folder / f"{kind}-{number}.ticket").touch()


def take(folder: Path, kind: str) -> None:
    """Wait for a ticket and take it; each serves one worker."""
    while True:
        for path in sorted(folder.glob(f"{kind}-*.ticket")):
            try:
                path.rename(path.with_suffix(".taken"))
            except FileNotFoundError:
                continue  # another worker was quicker
            return
        time.sleep(POLL_S[kind])
