"""Memory that the trainer and a worker process share, and that needs neither a name nor space in /dev/shm.

It is an anonymous file (`memfd_create(2)`) whose descriptor is sent to the worker: one descriptor per request, however
many tensors it holds, and gone when both processes are, however they went.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref

import torch

_ALIGNMENT_BYTES = 64


def aligned(size_bytes: int) -> int:
    """`size_bytes`, rounded up so that what follows is aligned for every type of element."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class SharedMemory:
    """A mapped anonymous file.

    Args:
        descriptor: of the file; owned by this object from now on.
        size_bytes: how large it is, more than 0.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        weakref.finalize(self, os.close, descriptor)
        self._mapping = mmap.mmap(descriptor, size_bytes)  # unmapped when the last tensor in it is gone

    @classmethod
    def allocate(cls, size_bytes: int) -> SharedMemory:
        """New memory, all zeros; pages are taken from the host when they are first written.

        Raises:
            OSError: the host gives none.
        """
        if sys.platform == "linux":
            descriptor = os.memfd_create("async-checkpoint", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor, size_bytes)

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A part of it (more than 0 bytes), as a tensor of bytes that keeps the mapping alive."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size_bytes, offset=offset)


class MemoryPool:
    """Hands out shared memory, and with `reuse` the same again once it was given back.

    Pages that are there already need not be zeroed and mapped again, which takes longer than the copy itself.
    """

    def __init__(self, reuse: bool) -> None:
        self.reuse = reuse
        self._free: list[SharedMemory] = []

    def take(self, size_bytes: int) -> SharedMemory:
        """Memory of at least this size, that nobody else uses."""
        for memory in sorted(self._free, key=lambda free: free.size_bytes):
            if memory.size_bytes >= size_bytes:
                self._free.remove(memory)
                return memory
        self._free.clear()  # all too small: a larger one takes their place
        return SharedMemory.allocate(size_bytes)

    def give_back(self, memory: SharedMemory) -> None:
        """The worker is done with it."""
        if self.reuse:
            self._free.append(memory)
