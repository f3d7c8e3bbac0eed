"""Datasets and loaders of other libraries that keep their own place: `state_dict` and `load_state_dict`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchelastic.data.sources.api import SourceError, fields


class Stateful(Protocol):
    """Something to iterate over that keeps its own place, as torchdata's StatefulDataLoader does."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """The next iterator begins there."""


@dataclass(frozen=True)
class from_stateful:
    """What a loader yields that keeps its own place, such as torchdata's `StatefulDataLoader`.

    Args:
        make_loader: called as `make_loader(shard, num_shards)`; what it returns has `state_dict` and `load_state_dict`,
            and its state must be plain data that JSON can hold: numbers, texts, lists and dicts.

    Raises:
        SourceError: (when its position is asked for) the state is something else.
    """

    make_loader: Callable[[int, int], Stateful]

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Any]:
        """Opens a shard; see `Source`."""
        return _StatefulIterator(self.make_loader(shard, num_shards), position)


@dataclass(frozen=True)
class from_datasets:
    """The examples of a Hugging Face `datasets.IterableDataset`.

    If its own shards can be dealt evenly to the logical shards (`dataset.num_shards` is a multiple), each logical shard
    reads only what it has; else each reads everything and keeps each n-th example. Choose the number of logical shards
    accordingly. For each epoch `set_epoch` is called.

    Shuffle with `shuffled`, not with the dataset's own `shuffle`: the buffer of that is not in its state, so the
    examples in it would be lost at each change of the group.

    Args:
        dataset: the IterableDataset, not split before. A `Dataset` becomes one by `to_iterable_dataset(num_shards)`.
        epoch: which `for_epoch` sets.

    Raises:
        ImportError: (when opened) `datasets` is not installed.
        SourceError: (when opened) the dataset has a shuffle buffer, or is no IterableDataset.
    """

    dataset: Any
    epoch: int = 0

    def for_epoch(self, epoch: int) -> from_datasets:
        """The source for an epoch."""
        return replace(self, epoch=epoch)

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Any]:
        """Opens a shard; see `Source`."""
        try:
            from datasets import IterableDataset
            from datasets.distributed import split_dataset_by_node
        except ImportError as error:
            raise ImportError(f"{error}; this source needs the package datasets: pip install datasets") from error
        if not isinstance(self.dataset, IterableDataset):
            raise SourceError(
                f"{type(self.dataset).__name__} is no datasets.IterableDataset: load it with streaming=True, or call "
                "its to_iterable_dataset(num_shards=..)"
            )
        _require_no_shuffle_buffer(self.dataset)
        # a copy, because the place is in the stages of the dataset, which its parts share
        part = split_dataset_by_node(copy.deepcopy(self.dataset), rank=shard, world_size=num_shards)
        part.set_epoch(self.epoch)
        return _StatefulIterator(_Examples(part), position)


class _Examples:
    """A datasets.IterableDataset one by one, also in a worker process.

    There its `__iter__` would leave out what it takes for the other workers' part; `iter(batch_size)` does not.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset.iter(batch_size=1):  # columns, or a table where the dataset has such a format
            yield {name: column[0] for name, column in batch.items()} if isinstance(batch, Mapping) else batch


def _require_no_shuffle_buffer(dataset: Any) -> None:
    """Raises SourceError where examples would be lost. The package has no public way to ask."""
    stage = getattr(dataset, "_ex_iterable", None)
    while stage is not None:
        if getattr(stage, "buffer_size", 1) > 1:
            raise SourceError(
                "the dataset has a shuffle buffer, which is not in its state, so examples would be lost: leave out "
                "its shuffle(), or give it buffer_size=1 (then it shuffles its shards), and use "
                "torchelastic.data.shuffled"
            )
        stage = getattr(stage, "ex_iterable", None)


class _StatefulIterator(Iterator[Any]):
    def __init__(self, loader: Stateful, position: Any) -> None:
        self._loader = loader
        self._is_over, self._is_checked = False, False
        self._start = position
        self._samples: Iterator[Any] | None = None
        if position != 0:
            state, self._is_over = fields(position, "state", "over")
            if not self._is_over:
                loader.load_state_dict(state)

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._samples is None:
            self._samples = iter(self._loader)
        try:
            return next(self._samples)
        except StopIteration:
            self._is_over = True  # for the loader it may be the beginning of its next epoch
            raise

    def state_dict(self) -> Any:
        if self._is_over:
            return {"state": None, "over": True}
        if self._samples is None:
            return self._start
        state = self._loader.state_dict()
        if not self._is_checked:
            self._is_checked = True
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise SourceError(f"the state of {type(self._loader).__name__} is no plain data: {error}") from None
        return {"state": state, "over": False}
