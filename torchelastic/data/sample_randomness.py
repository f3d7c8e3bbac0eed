"""What a dataset draws at random for a sample: the same numbers whoever reads it, and whenever.

Augmentations draw in `__getitem__`, from the generators of the process that reads. A sample that is read again, because
its step failed, because another worker reads it or a run is resumed, would come otherwise, and the run end otherwise.
So the generators are seeded for each sample, from (seed, epoch, key). A dataset that draws nothing pays for one look at
them in each batch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, default_collate, get_worker_info

from torchelastic.data.batch_sampler import Load
from torchelastic.data.shares import CollatedShards
from torchelastic.inventory.generators import generators
from torchelastic.inventory.reachable_generators import ReachableGenerators, Reached


def sample_seed(seed: int, epoch: int, key: object, part: str = "sample") -> int:
    """From what the random numbers of a sample are drawn, 0 to 2**64 - 1. Pure.

    Args:
        seed: of the run.
        epoch: from 0 up.
        key: by which the dataset is asked for it.
        part: "batch": for those of the batch that begins with it.
    """
    content = f"{seed} {epoch} {key!r}".encode()
    digest = hashlib.blake2b(content, digest_size=8, person=f"te-{part}".encode()).digest()
    return int.from_bytes(digest, "little")


class SeededSamples(Dataset[Any]):
    """Takes the place of a dataset and of a collate_fn in a DataLoader that is asked for `Load`s.

    Where it reads in the trainer (num_workers=0), what the train step draws is as if nothing had been read.

    Args:
        dataset: of the user. The first batch for which it draws anything is read twice.
        collate_fn: of the user; None: torch's.
        seed: of the run.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[Any], Any] | None, seed: int) -> None:
        self.dataset = dataset
        self._collate = default_collate if collate_fn is None else collate_fn
        self._seed = seed
        self._draws = False
        self._reached: ReachableGenerators | None = None
        self._load = Load(0, [])
        self._of_step: Reached | None = None
        self._has_drawn = False

    def __getitems__(self, load: Load) -> list[Any]:
        """Called by torch for each batch."""
        if self._reached is None:
            self._reached = ReachableGenerators(self.dataset, self._collate)
            self._draws = self._reached.holds_own
        self._load = load
        in_trainer = get_worker_info() is None
        self._of_step = self._reached.state() if in_trainer or not self._draws else None
        self._has_drawn = False
        try:
            return self._samples(load)
        except BaseException:
            self._has_drawn = True  # it may have
            self._put_back()
            raise

    def collate(self, samples: list[Any]) -> Any:
        """Called by torch with what `__getitems__` returned, in the same process."""
        try:
            if self._collate is default_collate:
                return self._collate(samples)
            sizes = self._load.sizes or (len(samples),)
            ends = itertools.accumulate(sizes)
            parts = [self._collated(samples, end - size, end) for size, end in zip(sizes, ends, strict=True)]
            return CollatedShards(parts) if self._load.sizes else parts[0]
        finally:
            self._put_back()

    def _collated(self, samples: list[Any], begin: int, end: int) -> Any:
        first = self._load.keys[begin]
        self._draw_from(sample_seed(self._seed, self._load.epoch, first, "batch"))
        return self._collate(samples[begin:end])

    def _samples(self, load: Load) -> list[Any]:
        if not self._draws:
            assert self._of_step is not None
            samples = self._read(load.keys)
            self._draws = not generators().draw_as(self._of_step.of_process)
            if not self._draws:
                return samples
        samples = []
        for key in load.keys:
            self._draw_from(sample_seed(self._seed, load.epoch, key))
            samples += self._read([key])
        return samples

    def _read(self, keys: list[Any]) -> list[Any]:
        of_batch: Callable[[list[Any]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        return of_batch(keys) if of_batch is not None else [self.dataset[key] for key in keys]

    def _draw_from(self, seed: int) -> None:
        assert self._reached is not None
        self._has_drawn = True
        self._reached.seed(seed)

    def _put_back(self) -> None:
        of_step, self._of_step = self._of_step, None
        if of_step is not None and self._reached is not None and self._has_drawn:
            self._reached.put(of_step)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": False, "_reached": None, "_of_step": None}


def with_own_dataset(of_user: Callable[[int], object] | None, worker: int) -> None:
    """A `worker_init_fn`: that of the user, to whom `get_worker_info().dataset` is the dataset that was given."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, SeededSamples):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch lets nobody set it
    if of_user is not None:
        of_user(worker)
