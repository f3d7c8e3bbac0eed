"""The same source again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torchelastic.data.sources.api import Source, fields, of_epoch, opened

T = TypeVar("T")


@dataclass(frozen=True)
class repeated(Generic[T]):
    """A source several times, one after the other; each time is an epoch to what shuffles inside.

    A shard that has no samples is over at once, also where it is to be repeated for ever. Position: which time it is,
    and the source's own.

    Args:
        source: what to repeat.
        times: how often; None: for ever.
        epoch: which `for_epoch` sets.

    Raises:
        ValueError: `times` is below 1.
    """

    source: Source[T]
    times: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.times is not None and self.times < 1:
            raise ValueError(f"times is {self.times}: give 1 or more, or None for ever")

    def for_epoch(self, epoch: int) -> repeated[T]:
        """The source for an epoch; no time in it is shuffled as one in another epoch, if `times` is given."""
        return replace(self, epoch=epoch)

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[T]:
        """Opens a shard; see `Source`."""
        return _Repeated(self, shard, num_shards, position)


class _Repeated(Iterator[T]):
    def __init__(self, how: repeated[T], shard: int, num_shards: int, position: Any) -> None:
        self._how, self._shard, self._num_shards = how, shard, num_shards
        self._time, begin = (0, 0) if position == 0 else fields(position, "time", "source")
        self._open(begin)

    def _open(self, position: Any) -> None:
        epoch = self._how.epoch * (self._how.times or 1) + self._time
        self._inner = opened(of_epoch(self._how.source, epoch), self._shard, self._num_shards, position)
        self._has_none = position == 0

    def __next__(self) -> T:
        while True:
            for sample in self._inner:
                self._has_none = False
                return sample
            if self._has_none or self._time + 1 == self._how.times:
                raise StopIteration
            self._time += 1
            self._open(0)

    def state_dict(self) -> Any:
        return {"time": self._time, "source": self._inner.state_dict()}
