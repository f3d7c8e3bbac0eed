"""What makes one source of others: a function of each sample, repeats, and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from torchelastic.data.sources.api import PlacedIterator, Source, fields, made, of_epoch, opened

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class mapped(Generic[T, R]):
    """What a function makes of each sample of a source: decoding, augmenting, choosing a field.

    Position: the source's own.

    Args:
        source: of samples.
        function: takes a sample; the same result for the same sample each time. It may draw at random where nothing
            around this reads ahead (`shuffled` goes inside): the stream seeds it for each sample. With worker processes
            that are spawned it must survive `pickle`: a function of a module, no lambda.
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
        return made(self._function, next(self._inner))

    def state_dict(self) -> Any:
        return self._inner.state_dict()


@dataclass(frozen=True)
class repeated(Generic[T]):
    """A source several times, one after the other; each time is an epoch to what shuffles inside.

    A shard that has no samples is over, also where it is to be repeated for ever. Position: which time it is, and the
    source's own.

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
            if self._time + 1 == self._how.times or (self._how.times is None and self._has_none):
                raise StopIteration
            self._time += 1
            self._open(0)

    def state_dict(self) -> Any:
        return {"time": self._time, "source": self._inner.state_dict()}


@dataclass(frozen=True)
class mixed(Generic[T]):
    """Samples of several sources, each chosen with a probability in proportion to its weight.

    Which source gives a sample is a pure function of the seed, the shard, the sample's number in the shard and of which
    sources are over. Position: that number, the names of those that are over, and the positions of the others.

    Args:
        sources: by name. Wrap one in `repeated` to have it for as long as the others last.
        weights: for each name, above 0; only their proportions count.
        seed: the order of the choices.
        until: "all": the shard ends when all sources are over, so each sample comes once; what is left of the longer
            ones comes in their proportions. "first": it ends when a source is chosen that is over.

    Raises:
        ValueError: the names differ, there is none, a weight is not above 0, or `until` is something else.
    """

    sources: Mapping[str, Source[T]]
    weights: Mapping[str, float]
    seed: int = 0
    until: Literal["all", "first"] = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not isinstance(self.weights, Mapping):
            raise ValueError("sources and weights are dicts with the same names")
        if not self.sources or set(self.sources) != set(self.weights):
            raise ValueError(f"give one weight for each source: {sorted(self.sources)} have {sorted(self.weights)}")
        if not all(0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError(f"weights are numbers above 0, got {dict(self.weights)}")
        if self.until not in ("all", "first"):
            raise ValueError(f"until is {self.until!r}: give 'all' or 'first'")

    def for_epoch(self, epoch: int) -> mixed[T]:
        """The source for an epoch."""
        return replace(self, sources={name: of_epoch(source, epoch) for name, source in self.sources.items()})

    def choice(self, shard: int, number: int, over: frozenset[str]) -> str:
        """Which source gives a sample. Pure.

        Args:
            shard: the logical shard.
            number: of the sample in it, from 0.
            over: the sources that have no more; not all of them.
        """
        digest = hashlib.blake2b(f"{self.seed} {shard} {number}".encode(), digest_size=8).digest()
        names = [name for name in sorted(self.sources) if name not in over]
        rest = int.from_bytes(digest, "little") / 2**64 * sum(self.weights[name] for name in names)
        for name in names[:-1]:
            rest -= self.weights[name]
            if rest < 0:
                return name
        return names[-1]

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[T]:
        """Opens a shard; see `Source`."""
        return _Mixed(self, shard, num_shards, position)


class _Mixed(Iterator[T]):
    def __init__(self, how: mixed[T], shard: int, num_shards: int, position: Any) -> None:
        self._how, self._shard = how, shard
        self._number, over, places = (
            (0, [], dict.fromkeys(how.sources, 0)) if position == 0 else fields(position, "number", "over", "sources")
        )
        self._over = frozenset[str](over)
        open_names = set(how.sources) - self._over
        inner = fields(places, *sorted(open_names))
        self._inner: dict[str, PlacedIterator[T]] = {
            name: opened(how.sources[name], shard, num_shards, place)
            for name, place in zip(sorted(open_names), inner, strict=True)
        }

    def __next__(self) -> T:
        while self._inner:
            name = self._how.choice(self._shard, self._number, self._over)
            for sample in self._inner[name]:
                self._number += 1
                return sample
            if self._how.until == "first":
                break
            self._over |= {name}
            del self._inner[name]
        raise StopIteration

    def state_dict(self) -> Any:
        places = {name: samples.state_dict() for name, samples in self._inner.items()}
        return {"number": self._number, "over": sorted(self._over), "sources": places}
