"""Slots of another process of this host, mapped into this one: where a save is finished beside the training process.

Mapping a file costs a page fault per page, so a mapping is kept while the file is there: slots are used again.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import torch

from torchelastic.checkpoint.errors import explained


class MappedSlot:
    """A file of another process, mapped to read and write it.

    Args:
        path: the file.

    Attributes:
        memory: all of it.

    Raises:
        CheckpointError: it is not there, or cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        with explained("map memory for the checkpoint", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._map = mmap.mmap(self._descriptor, 0)
            except BaseException:
                os.close(self._descriptor)
                raise
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self) -> memoryview:
        """All of it as bytes."""
        return memoryview(self._map)

    def is_gone(self) -> bool:
        """Whether its owner has removed the file."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Forgets the file; the memory goes with the last tensor in it."""
        os.close(self._descriptor)


_lock = threading.Lock()
_known: dict[tuple[int, int, int], MappedSlot] = {}


def map_slot(path: Path) -> MappedSlot:
    """The mapping of a file, an old one where there is one. Raises: CheckpointError."""
    with _lock:
        for key, slot in list(_known.items()):
            if slot.is_gone():
                _known.pop(key).close()
        with explained("map memory for the checkpoint", path):
            status = path.stat()
        key = (status.st_dev, status.st_ino, status.st_size)
        if key not in _known:
            _known[key] = MappedSlot(path)
        return _known[key]
