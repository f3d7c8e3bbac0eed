"""A shuffle whose place fits into a few numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from torchelastic.data.sources.api import PlacedIterator, Source, fields, of_epoch, opened, place_of

T = TypeVar("T")


@dataclass(frozen=True)
class shuffled(Generic[T]):
    """The samples of a source in another order: blocks of `buffer_size` samples, each shuffled by itself.

    A buffer that is refilled sample by sample would have to be saved with its samples, or be replayed from the
    beginning of the shard. A block depends on nothing but where it begins, its number, the seed, the shard and the
    epoch. So the position is the source's at the beginning of the block and how many of the block were drawn, and at
    most `buffer_size` samples are read again when a shard is opened. Samples move by less than `buffer_size` places:
    for an order without long runs of neighbours, let the files be in a random order too.

    Args:
        source: what to shuffle.
        buffer_size: samples in a block; that many are in memory for each shard.
        seed: the order of everything.
        epoch: which `for_epoch` sets.

    Raises:
        ValueError: `buffer_size` is below 1.
    """

    source: Source[T]
    buffer_size: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(f"buffer_size is {self.buffer_size}: give at least 1")

    def for_epoch(self, epoch: int) -> shuffled[T]:
        """The source for an epoch, which has an order of its own."""
        return replace(self, source=of_epoch(self.source, epoch), epoch=epoch)

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[T]:
        """Opens a shard; see `Source`."""
        return _Shuffled(self, shard, num_shards, position)


class _Shuffled(Iterator[T]):
    def __init__(self, how: shuffled[T], shard: int, num_shards: int, position: Any) -> None:
        self._how, self._shard = how, shard
        place = (0, 0, 0) if position == 0 else fields(position, "block", "drawn", "source")
        self._number: int = place[0]
        self._drawn: int = place[1]
        self._begin = place[2]
        self._inner: PlacedIterator[T] = opened(how.source, shard, num_shards, self._begin)
        self._block: list[T] | None = None

    def __next__(self) -> T:
        if self._block is None:
            self._fill()
        elif self._drawn == len(self._block):
            self._number, self._drawn, self._begin = self._number + 1, 0, self._end
            self._fill()
        assert self._block is not None
        if self._drawn >= len(self._block):
            raise StopIteration
        self._drawn += 1
        return self._block[self._drawn - 1]

    def _fill(self) -> None:
        block = list(islice(self._inner, self._how.buffer_size))
        self._end = place_of(self._inner)
        dice = random.Random(f"{self._how.seed} {self._shard} {self._how.epoch} {self._number}")
        # of this class Python promises the same random(), and of no other method, for all versions to come
        keys = [dice.random() for _ in block]
        self._block = [block[place] for place in sorted(range(len(block)), key=keys.__getitem__)]

    def state_dict(self) -> Any:
        if self._block is not None and self._drawn == len(self._block):
            return {"block": self._number + 1, "drawn": 0, "source": self._end}
        return {"block": self._number, "drawn": self._drawn, "source": self._begin}
