"""Loads the batches of an `ElasticBatchSampler` for train steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchelastic.data.batch_sampler import ElasticBatchSampler, Load
from torchelastic.data.order import mixed_seed
from torchelastic.data.placing import say_if_all_load_all
from torchelastic.data.sample_randomness import SeededSamples, with_own_dataset
from torchelastic.data.worker_processes import WorkerProcesses, begin_data_worker
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.text import shortlist

# What the sampler decides, and what would hand out batches in another order than they are counted in.
_DECIDED_BY_SAMPLER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


class _UpcomingBatches:
    """The loader's side of the sampler as DataLoader wants it: iterable again and again, from the present position."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Load]:
        return self._sampler.upcoming_loads()


class ElasticLoader(Iterator[Any]):
    """An endless-looking iterator for train steps: `next(loader)` is this rank's share of the next global batch.

    It counts each batch it hands out (`sampler.consume()`), goes over the ends of epochs without a pause, and raises
    StopIteration after the last one. When the sampler was rolled back, loaded or given a new world it notices by
    itself and continues from where the sampler is now. Prefetching workers may run ahead as they like: only what was
    handed out counts, and only for good once it is committed.

    For gradient accumulation call `next` several times in one step, on every rank equally often. If StopIteration
    comes in the middle, what was drawn before it is in `sampler.pending` and still wants a step::

        batches = list(itertools.islice(loader, 4))
        if not batches:
            raise StopIteration

    What the dataset draws at random for a sample, from torch, `random`, numpy or a generator that it holds, depends on
    (seed, epoch, key) alone: it is the same when a step is repeated, on whichever rank and in whichever process, with
    any `num_workers`, and after a restart. What `collate_fn` draws depends on the first of the samples that it gets:
    the rank's share, or with logical shards one of them, each of which is collated by itself. The first batch for which
    the dataset draws is read twice. What the train step draws (dropout) is not touched.
    Use it from the training thread only. A pickled or copied loader starts its workers anew.

    Args:
        dataset: map-style dataset with the length that the sampler was made for.
        sampler: says what to load; its `set_world` must have been called if there are several ranks.
        **dataloader_kwargs: for `torch.utils.data.DataLoader`: num_workers, collate_fn, pin_memory, ... With workers,
            `persistent_workers` is True unless given.

    Raises:
        ValueError: the dataset is iterable-style or of another length, or an argument is given that the sampler decides
            (batch_size, shuffle, sampler, batch_sampler, drop_last, in_order).
    """

    def __init__(self, dataset: Dataset[Any], sampler: ElasticBatchSampler, **dataloader_kwargs: Any) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{type(dataset).__name__} is an IterableDataset, and ElasticLoader needs a map-style dataset, since "
                "it asks for samples by index: write __getitem__ and __len__, or use ElasticStream, which keeps each "
                "sample once for data without an index"
            )
        size = len(dataset)  # type: ignore[arg-type] # torch types no __len__ on Dataset, but batch sampling needs one
        if size != sampler.dataset_size:
            raise ValueError(
                f"the dataset has {size} samples but its sampler was made for {sampler.dataset_size}: make them equal"
            )
        unsupported = [name for name in _DECIDED_BY_SAMPLER if name in dataloader_kwargs]
        if unsupported:
            raise ValueError(
                f"ElasticLoader does not take {', '.join(unsupported)}: the sampler decides what comes when"
            )
        self.dataset = dataset
        self.sampler = sampler
        self._options = dict(dataloader_kwargs)
        if self._options.get("num_workers", 0) > 0:
            self._options.setdefault("persistent_workers", True)
        self._dataloader: DataLoader[Any] | None = None
        self._running: Iterator[Any] | None = None
        self._running_for: tuple[tuple[int, int], int, int, int, int] | None = None
        self._processes = WorkerProcesses("this loader")

    def __iter__(self) -> ElasticLoader:
        return self

    def __next__(self) -> Any:
        if self.sampler.position[0] >= self.sampler.epochs:
            self.close()
            self.sampler.consume()  # raises
        try:
            batch = self._processes.surviving(self._draw, self.close, self._of_what)
        except BaseException as error:
            # A worker may be in the middle of another batch: begin again with a fresh set.
            self.close()
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    "the DataLoader ended before its sampler did: does a dataset or collate_fn raise StopIteration?"
                ) from error
            raise
        self.sampler.consume()
        self._running_for = self._place()
        return self.sampler.handed_out(batch)

    def reset(self) -> None:
        """Drop what was prefetched; the next `next` starts from where the sampler is. Keeps the workers.

        Never needed for correctness. Costs nothing when nothing is running.
        """
        self._running = None
        self._running_for = None
        if not self._options.get("persistent_workers"):  # they end with each iterator, and should
            self._processes.end()

    def close(self) -> None:
        """Drop what was prefetched and have the workers end, without waiting. A later `next` starts them anew."""
        self.reset()
        self._dataloader = None
        self._processes.end()

    def _place(self) -> tuple[tuple[int, int], int, int, int, int]:
        sampler = self.sampler
        return sampler.position, sampler.rank, sampler.world_size, sampler.deals, sampler.min_local_batch

    def _draw(self) -> Any:
        # Comparing positions is exact: a rollback with nothing drawn, or loading the position where we are, keeps what
        # was prefetched.
        if self._running is None or self._running_for != self._place():
            self._start()
        assert self._running is not None
        began_ns = time.monotonic_ns()
        batch = self._processes.next_of(self._running)
        this_worker().waited_for_data(time.monotonic_ns() - began_ns)
        return batch

    def _of_what(self) -> str:
        """The sample that ends a process which reads it, or else the batch; it may have been read ahead."""
        from torchelastic.data.deadly_sample import find_deadly

        read_ahead = self._options["num_workers"] * (self._options.get("prefetch_factor") or 2)
        batches = list(itertools.islice(self.sampler.upcoming(), 1 + read_ahead))
        keys = list(itertools.chain.from_iterable(batches))
        return find_deadly(self.dataset, keys, self._options) or f"one of the samples {shortlist(keys, 16)}"

    def _start(self) -> None:
        self.reset()
        say_if_all_load_all(self.sampler)
        if self._dataloader is None:
            options = {"generator": torch.Generator(), **self._options}
            if options.get("num_workers"):
                of_user = partial(with_own_dataset, options.get("worker_init_fn"))
                options["worker_init_fn"] = partial(begin_data_worker, of_user)
            samples = SeededSamples(self.dataset, options.pop("collate_fn", None), self.sampler.seed)
            batches: Any = _UpcomingBatches(self.sampler)
            self._dataloader = DataLoader(samples, batch_sampler=batches, collate_fn=samples.collate, **options)
        if "generator" not in self._options and self._dataloader.generator is not None:
            (epoch, number), rank, *_ = self._place()
            base = mixed_seed(self.sampler.seed, epoch)
            self._dataloader.generator.manual_seed(mixed_seed(base * 2**32 + number, rank))
        self._running = self._processes.started_by(self._dataloader)
        self._running_for = self._place()

    def __getstate__(self) -> dict[str, object]:
        nothing = {"_dataloader": None, "_running": None, "_running_for": None}
        return {**self.__dict__, **nothing, "_processes": WorkerProcesses("this loader")}
