"""0.1's sampler, made exactly-once, and its iterator over epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import Dataset, DistributedSampler

from torchelastic.data.order import epoch_order

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ElasticDistributedSampler(DistributedSampler[int]):
    """A `DistributedSampler` that can begin in the middle of an epoch, with another number of replicas than before.

    The epoch has one order, given by seed and epoch alone. Its first `start_index` entries count as consumed, however
    many replicas consumed them; the rest is assigned in turns. So over any chain of resizes every index is seen
    exactly once. (0.1 shuffled what was left anew at each resize, and lost samples.) To give every replica equally
    many, entries of the rest are repeated after its end, at most num_replicas - 1.

    The next epoch begins at 0 again: call `set_epoch(epoch, start_index=0)`.

    Args:
        dataset: must have a length.
        num_replicas: number of processes; default: the world size of the default process group.
        rank: this process; default: its rank in the default process group.
        start_index: how many samples of the epoch all replicas together have consumed, 0 to len(dataset).
        shuffle: False keeps the dataset's order.
        seed: equal on all ranks.
        drop_last: drop the last few samples instead of repeating some.

    Raises:
        ValueError: `start_index` or `rank` is out of range, or there is no process group to take defaults from.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.start_index = start_index

    @property
    def start_index(self) -> int:
        """How many entries of the epoch's order were consumed before this sampler begins."""
        return self._start_index

    @start_index.setter
    def start_index(self, value: int) -> None:
        size = self._dataset_size
        if not 0 <= value <= size:
            raise ValueError(
                f"start_index is {value}, but the dataset has {size} samples: "
                f"it counts the consumed samples of one epoch, from 0 to {size}"
            )
        self._start_index = value
        left = size - value
        # the base class's attributes: samples per replica, and of all of them
        self.num_samples = left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def _dataset_size(self) -> int:
        return len(cast(Sized, self.dataset))

    def set_epoch(self, epoch: int, *, start_index: int | None = None) -> None:
        """Choose the epoch that the next iteration yields.

        Args:
            epoch: from 0 up, equal on all ranks.
            start_index: consumed samples of that epoch; None keeps the present value, as in 0.1.

        Raises:
            ValueError: `start_index` is out of range.
        """
        super().set_epoch(epoch)
        if start_index is not None:
            self.start_index = start_index

    def __iter__(self) -> Iterator[int]:
        if self._start_index and self._start_index == self._dataset_size:
            logger.warning(
                "epoch %d is empty: start_index is the length of the dataset; "
                "begin the next epoch with set_epoch(epoch, start_index=0)",
                self.epoch,
            )
        rest = epoch_order(self._dataset_size, self.seed, self.epoch, shuffle=self.shuffle)[
            self._start_index :
        ].tolist()
        while len(rest) < self.total_size:  # more than once where fewer samples are left than there are replicas
            rest += rest[: self.total_size - len(rest)]
        return iter(rest[self.rank : self.total_size : self.num_replicas])


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
