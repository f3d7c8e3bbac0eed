"""An iterator over several epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class CyclingIterator(Generic[T], Iterator[T]):
    """Chains `generator_fn(epoch)` for the epochs `start_epoch` to `n - 1`.

    The first epoch's iterable is made by the constructor, so that its loading can begin; each later one when the one
    before is exhausted. With `start_epoch >= n` there is nothing to do and `generator_fn` is never called.

    Args:
        n: total number of epochs.
        generator_fn: takes an epoch, returns what that epoch yields.
        start_epoch: the first epoch, above 0 when a run is resumed.

    Raises:
        ValueError: `n` or `start_epoch` is negative.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterable[T]], start_epoch: int = 0) -> None:
        if n < 0 or start_epoch < 0:
            raise ValueError(f"n and start_epoch count epochs from 0 up, got n={n} and start_epoch={start_epoch}")
        self._n = n
        self._generator_fn = generator_fn
        self._epoch = start_epoch
        self._items: Iterator[T] = iter(generator_fn(start_epoch)) if start_epoch < n else iter(())

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._items)
            except StopIteration:
                if self._epoch + 1 >= self._n:
                    raise
            self._epoch += 1
            self._items = iter(self._generator_fn(self._epoch))
