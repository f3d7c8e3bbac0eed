"""What a source is: the contract of everything in this folder, and of a source that you write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SourceError(ValueError):
    """The data is not there, is damaged, or is not what it was when a position was taken; names the file and place."""


class Source(Protocol[T_co]):
    """Opens one logical shard of the data at a place in it: `source(shard, num_shards, position)`.

    A pure function of its arguments: the same samples in the same order each time, in any process. It survives
    `pickle`, so that worker processes can be started with it. Where it has a method `for_epoch(epoch)`, that returns
    the source for this epoch, counted from 0: another order of the same samples.
    """

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[T_co]:
        """The samples of a shard from a position on; StopIteration ends the shard.

        Args:
            shard: 0 to num_shards - 1.
            num_shards: how many logical shards the data has; the same for the whole run, whatever its world size.
            position: 0 for the beginning; else what `state_dict()` of an earlier iterator of this shard returned, or,
                if that has no such method, how many samples were drawn since the beginning.
        """


class PlacedIterator(Protocol[T_co]):
    """Samples whose place is known."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def state_dict(self) -> Any:
        """The position behind the newest sample, as plain data that JSON can hold."""


class _Counted(Iterator[T]):
    """An iterator without `state_dict`: its position is the number of samples."""

    def __init__(self, samples: Iterator[T], drawn: int) -> None:
        self._samples, self._drawn = samples, drawn

    def __next__(self) -> T:
        sample = next(self._samples)
        self._drawn += 1
        return sample

    def state_dict(self) -> int:
        return self._drawn


def opened(source: Source[T], shard: int, num_shards: int, position: Any) -> PlacedIterator[T]:
    """The iterator of a shard, with `state_dict()` even where the source's own has none. Arguments as of `Source`."""
    samples = iter(source(shard, num_shards, copy.deepcopy(position)))  # it may go on in that very dict
    if hasattr(samples, "state_dict"):
        return cast(PlacedIterator[T], samples)
    return _Counted(samples, position)


def place_of(samples: PlacedIterator[Any]) -> Any:
    """Its position, to be kept while more samples are drawn: it may have given the dict in which it counts."""
    return copy.deepcopy(samples.state_dict())


def of_epoch(source: Source[T], epoch: int) -> Source[T]:
    """The source for an epoch, counted from 0: itself, if epochs are all the same to it."""
    for_epoch = getattr(source, "for_epoch", None)
    return source if for_epoch is None else cast(Source[T], for_epoch(epoch))


def made(function: Callable[[Any], T], argument: Any) -> T:
    """What a function of the user's makes of samples; it must not end the shard, or the run, by a `StopIteration`.

    Raises:
        RuntimeError: it did; the cause is where.
    """
    try:
        return function(argument)
    except StopIteration as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise RuntimeError(
            f"{name} raised StopIteration, by which samples would be skipped: does it call next()?"
        ) from error


def fields(position: Any, *names: str) -> tuple[Any, ...]:
    """The values of a position restored from a checkpoint.

    Raises:
        SourceError: it was taken from another kind of source.
    """
    if not isinstance(position, dict) or set(position) != set(names):
        raise SourceError(
            f"the position {str(position)[:200]!r} was taken from another source than this one, which has "
            f"{', '.join(names)}: build the stream from the same sources as before, or start without this state"
        )
    return tuple(position[name] for name in names)
