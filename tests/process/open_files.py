"""What this process has open in a folder: other threads, and what other tests have left, open and close at any time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> int:
    """How many descriptors it has of a folder, and of files that are in it or were."""
    count, name = 0, str(folder.resolve())
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            count += str(descriptor.readlink()).startswith(name)
    return count
