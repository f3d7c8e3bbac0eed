"""The data of a validation, shared by the ranks of a group: each sample once, in as many batches on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from torchelastic.adapters.in_process.batches import cut_into


class EvenBatches:
    """The batches of one rank: every so-manieth sample, cut so that all ranks have equally many where they can.

    They cannot where a rank has fewer samples than another one has batches.

    Args:
        samples: of the dataset.
        batch_size: at most.
        rank: of this worker.
        world_size: of its group.

    >>> [list(EvenBatches(9, 4, rank, 2)) for rank in (0, 1)]
    [[[0, 2, 4], [6, 8]], [[1, 3], [5, 7]]]
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int) -> None:
        own = range(rank, samples, world_size)
        most = -(-samples // world_size)
        self._batches = [list(part) for part in cut_into(own, min(-(-most // batch_size), len(own)))]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)


def shared(loader: Any, rank: int, world_size: int) -> Any:
    """A DataLoader of this rank's part of the data; what has an order of its own, or no length, stays as it is.

    Args:
        loader: of the user.
        rank: of this worker.
        world_size: of its group.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return loader
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return loader
    assert loader.batch_size is not None
    samples = len(loader.sampler)  # type: ignore[arg-type]  # these two have a length
    samples -= samples % loader.batch_size if loader.drop_last else 0
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    batches: Any = EvenBatches(samples, loader.batch_size, rank, world_size)
    return DataLoader(loader.dataset, batch_sampler=batches, generator=loader.generator, **options)
