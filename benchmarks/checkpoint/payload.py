"""The bytes that all of them save, and the floor that all are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from torchelastic.checkpoint.format.tensor_parts import memory_of

MIB = 2**20
#: A state of so much is loaded into itself, and the floor copies it piece by piece into as little memory as no cache
#: holds: saves keep two files of it, so that all that there is comes to three times the state.
LARGE_BYTES = 2048 * MIB
FLOOR_BYTES = 512 * MIB
#: A state of no more than this is also copied into other memory than the last time, as every save is that leaves the
#: checkpoint before in place: while caches hold the floor's two copies, that alone doubles the time.
SMALL_BYTES = 64 * MIB


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

    def checksums(self) -> list[int]:
        """What is there now, by which it is known again."""
        return [xxhash.xxh3_64_intdigest(memory_of(tensor)) for tensor in self.tensors.values()]

    def equals(self, other: dict[str, torch.Tensor]) -> bool:
        """Whether what was loaded is what is there."""
        return all(torch.equal(tensor, other[name]) for name, tensor in self.tensors.items())


class Memcpy:
    """A copy of the same bytes from warm memory into warm memory, with torch's own copy: the floor.

    Attributes:
        targets: what checkpoints are loaded into; what is copied into, too, unless the state is large.
    """

    def __init__(self, payload: Payload) -> None:
        self._sources = list(payload.tensors.values())
        if payload.size_bytes < LARGE_BYTES:
            self.targets = {name: torch.zeros_like(tensor) for name, tensor in payload.tensors.items()}
            self._targets = list(self.targets.values())
        else:
            self.targets = payload.tensors
            each_bytes = self._sources[0].nbytes
            few = [torch.zeros_like(source) for source in self._sources[: max(1, FLOOR_BYTES // each_bytes)]]
            self._targets = [few[index % len(few)] for index in range(len(self._sources))]
        sets = 3 if payload.size_bytes <= SMALL_BYTES else 0
        self._in_turn = [[torch.zeros_like(source) for source in self._sources] for _ in range(sets)]

    def once_ms(self) -> float:
        """One copy."""
        return timed_ms(lambda: torch._foreach_copy_(self._targets, self._sources))

    def elsewhere_ms(self) -> float | None:
        """One copy of a small state into other memory than the last time; None: the state is not small."""
        if not self._in_turn:
            return None
        self._in_turn.append(self._in_turn.pop(0))
        return timed_ms(lambda: torch._foreach_copy_(self._in_turn[0], self._sources))

    def median_ms(self, runs: int) -> float:
        """The median of some."""
        return statistics.median(self.once_ms() for _ in range(runs))


def timed_ms(work: Callable[[], object]) -> float:
    """How long it takes."""
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e3
