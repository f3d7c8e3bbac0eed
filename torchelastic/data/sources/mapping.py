"""A function of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torchelastic.data.sources.api import Source, of_epoch, opened

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class mapped(Generic[T, R]):
    """What a function makes of each sample of a source: decoding, augmenting, choosing a field.

    Position: the source's own.

    Args:
        source: of samples.
        function: takes a sample; the same result for the same sample each time. With worker processes that are spawned
            it must survive `pickle`: a function of a module, no lambda.
    """

    source: Source[T]
    function: Callable[[T], R]

    def for_epoch(self, epoch: int) -> mapped[T, R]:
        """The source for an epoch."""
        return replace(self, source=of_epoch(self.source, epoch))

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[R]:
        """Opens a shard; see `Source`."""
        return _Mapped(self, shard, num_shards, position)


class _Mapped(Iterator[R]):
    def __init__(self, how: mapped[T, R], shard: int, num_shards: int, position: Any) -> None:
        self._function: Callable[[Any], R] = how.function
        self._inner = opened(how.source, shard, num_shards, position)

    def __next__(self) -> R:
        return self._function(next(self._inner))

    def state_dict(self) -> Any:
        return self._inner.state_dict()
