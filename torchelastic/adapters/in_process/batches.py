"""A rank's share of a global batch, cut into micro batches of the size that the user gave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.p2p import CoordinatorP2P


class MicroBatch(NamedTuple):
    """A part of a rank's share.

    Attributes:
        inputs: for the model, as the user's collator makes them.
        samples: in it; 0: it is computed for the sake of the other ranks, and counts nothing.
    """

    inputs: Any
    samples: int


class MicroBatches(tuple[MicroBatch, ...]):
    """What a framework takes for one batch: as many micro batches on each rank, which may call each other in each."""


def cut(samples: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Parts of nearly equal size, none larger than `most`. Pure.

    >>> cut("abcdefg", 3)
    ['abc', 'de', 'fg']
    """
    return cut_into(samples, -(-len(samples) // most))


def cut_into(samples: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """So many parts of nearly equal size. Pure.

    >>> cut_into("abcdefg", 2)
    ['abcd', 'efg']
    """
    sizes = [len(samples) // parts + (number < len(samples) % parts) for number in range(parts)]
    return [samples[sum(sizes[:number]) : sum(sizes[: number + 1])] for number in range(parts)]


def padded(parts: Sequence[MicroBatch], count: int, *, is_padding: bool) -> MicroBatches:
    """So many micro batches: those that are missing repeat the last one, and count nothing. Pure."""
    own = [part._replace(samples=0) if is_padding else part for part in parts]
    return MicroBatches([*own, *[parts[-1]._replace(samples=0)] * (count - len(parts))])


def largest_group(coordinator: CoordinatorP2P) -> int:
    """How many workers the launcher allows at most, by which a global batch is measured; 1 without a launcher."""
    workers = coordinator.max_num_trainers
    return 1 if workers == sys.maxsize else workers


class _Collator:
    """Makes a list of micro batches of what the loader has read; also in its processes."""

    def __init__(self, collate: Callable[[Any], Any], most: int) -> None:
        self._collate, self._most = collate, most

    def __call__(self, samples: Sequence[Any]) -> list[tuple[Any, int]]:
        return [(self._collate(part), len(part)) for part in cut(samples, self._most)]


class _Sampler(ElasticBatchSampler):
    """Of loops that know which micro batches are padding, and give them the count 0."""

    counts_padding = False

    def load_of(self, position: tuple[int, int]) -> tuple[int, ...]:
        """The dataset indices of this rank's share of a batch of any epoch."""
        return self._share(position).load


class EpochBatches:
    """Takes the place of a framework's DataLoader: each `next` is this rank's share of the next global batch.

    Args:
        plain: the DataLoader that the framework would have used: its dataset, collator and processes.
        global_batch_size: samples of a step, whatever the size of the group.
        micro_batch_size: samples that the model gets at once, at most.
        epochs: of the run, where it ends after so many.
        max_steps: else after so many; below 1: it does not.
        seed: of the order.
        drop_last: leave out an epoch's last batch if it is not full.
        shuffle: a new order in each epoch; else the dataset's own.
        **options: more for the `ElasticLoader`.
    """

    def __init__(
        self,
        plain: DataLoader[Any],
        global_batch_size: int,
        micro_batch_size: int,
        *,
        epochs: int,
        max_steps: int,
        seed: int,
        drop_last: bool,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        dataset: Any = plain.dataset
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        if max_steps > 0:
            full, rest = divmod(len(dataset), global_batch_size)
            epochs = -(-max_steps // max(1, full + bool(rest and not drop_last)))
        self.sampler = _Sampler(
            dataset,
            global_batch_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        options |= {"num_workers": plain.num_workers, "pin_memory": plain.pin_memory}
        if plain.num_workers:
            options["multiprocessing_context"] = plain.multiprocessing_context
            options["prefetch_factor"] = plain.prefetch_factor
        self._collate = _Collator(plain.collate_fn, micro_batch_size)
        self._loader = ElasticLoader(plain.dataset, self.sampler, collate_fn=self._collate, **options)

    def __len__(self) -> int:
        return self.sampler.batches_per_epoch

    def __iter__(self) -> Iterator[MicroBatches]:
        return self

    def __next__(self) -> MicroBatches:
        parts = [MicroBatch(inputs, samples) for inputs, samples in next(self._loader)]
        share = self.sampler.pending[-1]
        most = self.sampler.largest_share(share.global_samples)
        return padded(parts, -(-most // self.micro_batch_size), is_padding=not share.local_samples)

    def share_of(self, epoch: int, number: int) -> Any:
        """The first micro batch of this rank's share of a batch of any epoch, read anew."""
        samples = [self.dataset[index] for index in self.sampler.load_of((epoch, number))]
        return self._collate(samples)[0][0]

    @property
    def committed(self) -> int:
        """Steps of the run that have been trained."""
        return self.sampler.epoch * len(self) + self.sampler.cursor // self.sampler.global_batch_size

    def go_to(self, step: int) -> None:
        """The next batch is that of this step, counted from 0."""
        epoch, number = divmod(step, len(self))
        cursor = number * self.sampler.global_batch_size
        self.sampler.load_state_dict({**self.sampler.state_dict(), "epoch": epoch, "cursor": cursor})

    def close(self) -> None:
        """End the processes of the loader."""
        self._loader.close()
