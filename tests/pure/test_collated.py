"""Batches of worker processes, joined, are the batch that one process would have made."""

from __future__ import annotations

import itertools
import pickle
from collections import UserDict
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import default_collate

from torchelastic.data.worker_processes import BY_VALUE_BYTES, hand_over_by_value, joined


class Pair(NamedTuple):
    inputs: torch.Tensor
    label: int


SAMPLES: dict[str, list[Any]] = {
    "tensors": [torch.arange(3) + number for number in range(5)],
    "half precision": [torch.full((2,), number, dtype=torch.bfloat16) for number in range(5)],
    "large ones": [torch.full((BY_VALUE_BYTES,), float(number)) for number in range(3)],
    "numbers": list(range(5)),
    "arrays": [np.full((2, 2), number, dtype=np.float32) for number in range(5)],
    "texts": ["a", "b", "", "d", "e"],
    "nested": [{"x": torch.ones(2) * n, "y": (n, f"{n}"), "z": Pair(torch.tensor(n), n)} for n in range(5)],
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)], ids=str)
def test_parts_are_joined_to_the_whole_batch(kind: str, cuts: tuple[int, ...]) -> None:
    samples = SAMPLES[kind]
    edges = [0, *(cut for cut in cuts if cut < len(samples)), len(samples)]
    parts = [default_collate(samples[begin:end]) for begin, end in itertools.pairwise(edges)]
    assert equal(joined(parts), default_collate(samples))


@pytest.fixture
def handed_over() -> Iterator[Callable[[Any], Any]]:
    """What arrives in another process."""
    hand_over_by_value()
    try:
        yield lambda sent: pickle.loads(ForkingPickler.dumps(sent))
    finally:
        ForkingPickler.register(torch.Tensor, reduce_tensor)


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_arrives_is_what_was_handed_over(kind: str, handed_over: Callable[[Any], Any]) -> None:
    assert equal(handed_over(SAMPLES[kind]), SAMPLES[kind])


def test_only_small_tensors_go_by_value(handed_over: Callable[[Any], Any]) -> None:
    small, large = torch.zeros(8), torch.zeros(BY_VALUE_BYTES)
    assert not handed_over([small])[0].is_shared()
    assert handed_over([large])[0].is_shared()
    view = handed_over(torch.zeros(100 * BY_VALUE_BYTES // 4)[:8])  # not all that it is cut from
    assert view.untyped_storage().nbytes() == 32
    assert joined([]) is None


def test_tensors_that_numpy_has_not_are_handed_over_too(handed_over: Callable[[Any], Any]) -> None:
    sparse = handed_over(torch.eye(2).to_sparse())
    assert torch.equal(sparse.to_dense(), torch.eye(2))
    assert handed_over(torch.ones(2, requires_grad=True)).requires_grad


def test_a_mapping_of_another_kind_is_joined_too() -> None:
    sample = UserDict(x=torch.ones(2))
    parts = [default_collate([sample, sample]), default_collate([sample])]
    assert equal(joined(parts), {"x": torch.ones(3, 2)})


def test_what_cannot_be_joined_is_named() -> None:
    with pytest.raises(TypeError, match="default_collate made a int: give a collate_fn of your own"):
        joined([1, 2])
