"""The bytes that all contenders save, and the floor they are compared with, in memory that all their processes share.

One copy for all of them: four contenders with a gigabyte of their own, and another one to copy it to, would not fit
into the memory of a small machine. Only one of them works at a time.
"""

from __future__ import annotations

import mmap
import os
import statistics
from pathlib import Path

import torch

from benchmarks.checkpoint.payload import MIB, Payload, timed_ms

FLOOR_RUNS = 3


def create(path: Path, size_mib: int) -> None:
    """Makes a file that `tensors_of` maps; fails at once where there is no room for it."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_mib * MIB)
    finally:
        os.close(descriptor)


def tensors_of(path: Path, count: int) -> dict[str, torch.Tensor]:
    """`count` float32 tensors of equal size, each with a storage of its own, which write through to the file."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    numel = len(memory) // 4 // count
    return {
        f"layer.{index}": torch.frombuffer(memory, dtype=torch.float32, count=numel, offset=index * numel * 4)
        for index in range(count)
    }


class SharedBytes:
    """A state, and warm memory of the same size, which it is copied to (the floor) and loaded into.

    Args:
        source: the file with the state; what it holds is the same for all who open it.
        target: the file to copy to.
        count: of tensors.
    """

    def __init__(self, source: Path, target: Path, count: int) -> None:
        tensors = tensors_of(source, count)
        for index, tensor in enumerate(tensors.values()):
            torch.arange(index, index + tensor.numel(), out=tensor)
        self.payload = Payload(tensors, sum(tensor.nbytes for tensor in tensors.values()))
        self.target = tensors_of(target, count)
        self.floor_ms()  # touches it

    def floor_ms(self) -> float:
        """A copy of the bytes from warm memory into warm memory, with torch's own copy: the median of a few."""
        sources, targets = list(self.payload.tensors.values()), list(self.target.values())
        return statistics.median(timed_ms(lambda: torch._foreach_copy_(targets, sources)) for _ in range(FLOOR_RUNS))
