"""Data whose order an adapter would lose are refused, and torch's own orders are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from torchelastic.adapters.hugging_face.accelerator_requirements import require_training_data
from torchelastic.adapters.in_process.requirements import require_known_order
from torchelastic.adapters.lightning.elastic_requirements import require_one_loader
from torchelastic.errors import UnfitError

DATA: Any = list(range(8))


class Backwards(RandomSampler):
    """A class that torch's own does not know: whoever takes it for a permutation of torch's is wrong."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1))


class Odd(BatchSampler):
    """Batches of an order of its own."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def drawn_by(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2, sampler=sampler)


@pytest.mark.parametrize("require", [require_known_order, require_one_loader, require_training_data])
@pytest.mark.parametrize(
    ("data", "named"),
    [
        (lambda: drawn_by(RandomSampler(DATA, replacement=True)), "a RandomSampler with replacement, whose order"),
        (lambda: drawn_by(RandomSampler(DATA, num_samples=4)), "a RandomSampler of 4 samples"),
        (lambda: drawn_by(Backwards(DATA)), "a Backwards"),
        (lambda: DataLoader(DATA, batch_sampler=Odd(SequentialSampler(DATA), 2, False)), "an? Odd"),
        (lambda: DataLoader(Stream(), batch_size=2), "an IterableDataset"),
    ],
)
def test_an_order_that_would_be_lost_is_refused_by_every_adapter(
    require: Callable[[Any], object], data: Callable[[], Any], named: str
) -> None:
    with pytest.raises(UnfitError, match=f"the training data is (drawn by )?{named}"):
        require(data())


def test_orders_of_torchs_own_are_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    for sampler in (RandomSampler(DATA), RandomSampler(DATA, generator=generator), SequentialSampler(DATA)):
        require_known_order(drawn_by(sampler))
    with pytest.raises(UnfitError, match=r"drawn by a SequentialSampler, .*: put the order into the dataset"):
        require_known_order(drawn_by(SequentialSampler(DATA)), "put the order into the dataset", is_permuted=True)
