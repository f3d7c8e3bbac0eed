"""Batches of worker processes, joined, are the batch that one process would have made."""

from __future__ import annotations

import itertools
import pickle
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from torchelastic.data.worker_processes import BY_VALUE_BYTES, by_value, joined


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
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)], ids=str)
def test_parts_that_were_handed_over_are_the_whole_batch(kind: str, cuts: tuple[int, ...]) -> None:
    samples = SAMPLES[kind]
    edges = [0, *(cut for cut in cuts if cut < len(samples)), len(samples)]
    parts = [default_collate(samples[begin:end]) for begin, end in itertools.pairwise(edges)]
    handed_over = pickle.loads(pickle.dumps([by_value(part) for part in parts]))
    assert equal(joined(handed_over), default_collate(samples))


def test_only_small_tensors_go_by_value() -> None:
    small, large = torch.zeros(8), torch.zeros(BY_VALUE_BYTES)
    assert isinstance(by_value(small), np.ndarray)
    assert by_value(large) is large
    assert joined([]) is None


def test_a_mapping_of_another_kind_is_gone_through_too() -> None:
    sample = UserDict(x=torch.ones(2))
    parts = [by_value(default_collate([sample, sample])), by_value(default_collate([sample]))]
    assert isinstance(parts[0]["x"], np.ndarray)
    assert equal(joined(parts[:1]), {"x": torch.ones(2, 2)})
    assert equal(joined(parts), {"x": torch.ones(3, 2)})


def test_what_cannot_be_joined_is_named() -> None:
    with pytest.raises(TypeError, match="default_collate made a int: give a collate_fn of your own"):
        joined([1, 2])
