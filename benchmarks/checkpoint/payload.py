"""The bytes that all of them save, and the floor that all are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIB = 2**20


@dataclass(frozen=True)
class Payload:
    """A state of float32 tensors of equal size.

    Attributes:
        tensors: by name.
        size_bytes: all of them.
    """

    tensors: dict[str, torch.Tensor]
    size_bytes: int

    @classmethod
    def of(cls, size_mib: int, count: int) -> Payload:
        """`count` tensors, `size_mib` MiB in all."""
        numel = size_mib * MIB // 4 // count
        tensors = {f"layer.{index}": torch.rand(numel) for index in range(count)}
        return cls(tensors, numel * 4 * count)

    def change(self) -> None:
        """What a training step does to a state, cheaply: a stale copy of it must be noticed."""
        for tensor in self.tensors.values():
            tensor[0] += 1

    def equals(self, other: dict[str, torch.Tensor]) -> bool:
        """Whether what was loaded is what is there."""
        return all(torch.equal(tensor, other[name]) for name, tensor in self.tensors.items())


class Memcpy:
    """A copy of the same bytes from warm memory into warm memory, with torch's own copy: the floor.

    Attributes:
        targets: what is copied into; checkpoints are loaded into the same.
    """

    def __init__(self, payload: Payload) -> None:
        self._sources = list(payload.tensors.values())
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in payload.tensors.items()}
        self._targets = list(self.targets.values())

    def once_ms(self) -> float:
        """One copy."""
        return timed_ms(lambda: torch._foreach_copy_(self._targets, self._sources))

    def median_ms(self, runs: int) -> float:
        """The median of some."""
        return statistics.median(self.once_ms() for _ in range(runs))


def timed_ms(work: Callable[[], object]) -> float:
    """How long it takes."""
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e3
