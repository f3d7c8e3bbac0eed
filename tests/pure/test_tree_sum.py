"""A sum along the tree has the same bits for every way to deal the leaves out; other sums do not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.model import tree_sum
from torchelastic.model.tree_sum import Node


def plus(left: float, right: float) -> float:
    return left + right


def held_by(leaves: dict[int, float], of: int) -> dict[Node, float]:
    nodes: dict[Node, float] = {}
    for leaf in leaves:
        tree_sum.put(nodes, (0, leaf), leaves[leaf], of, plus)
    return nodes


@given(
    values=st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=20),
    owners=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    seed=st.integers(0, 1000),
)
def test_the_sum_does_not_depend_on_who_holds_what_nor_on_the_order(
    values: list[float], owners: list[int], seed: int
) -> None:
    size = len(values)
    alone = held_by(dict(enumerate(values)), size)
    assert list(alone) == [(tree_sum.depth(size), 0)]
    (expected,) = alone.values()
    shuffled = random.Random(seed)
    known: list[tuple[Node, float]] = []
    for owner in range(5):
        mine = [leaf for leaf in range(size) if owners[leaf] == owner]
        shuffled.shuffle(mine)
        known += held_by({leaf: values[leaf] for leaf in mine}, size).items()
    shuffled.shuffle(known)
    assert tree_sum.total(known, size, plus) == expected
    assert math.isclose(expected, math.fsum(values), rel_tol=1e-9, abs_tol=1e-6)


@given(start=st.integers(0, 63), stop=st.integers(0, 63), size=st.integers(1, 64))
def test_a_contiguous_range_is_at_most_two_nodes_a_level(start: int, stop: int, size: int) -> None:
    mine = range(min(start, size), min(stop, size))
    nodes = held_by(dict.fromkeys(mine, 1.0), size)
    assert tree_sum.leaves_of(nodes, size) == frozenset(mine)
    assert len(nodes) <= max(1, 2 * tree_sum.depth(size))


def test_a_missing_leaf_and_one_too_many_are_told() -> None:
    with pytest.raises(ValueError, match=r"missing: \[2\]"):
        tree_sum.total([((1, 0), 1.0), ((0, 3), 1.0)], 4, plus)
