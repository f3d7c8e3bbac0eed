"""Sums along one fixed binary tree, whoever holds which leaves: the same bits for every way to deal them out. Pure.

Floating-point addition is not associative, so a sum depends on the order. Here the order is that of a binary tree over
the leaves 0 to n-1: node (level, index) is the sum of (level-1, 2 index) and (level-1, 2 index + 1). Whoever holds a
contiguous range of leaves can sum up at most 2 log2(n) whole subtrees of it by himself; the few nodes above are summed
by everybody from those. (The idea: EasyScale, SC'23, for one model's virtual workers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Value = TypeVar("Value")
#: (level, index): it covers the leaves from index * 2**level up to (index + 1) * 2**level.
Node = tuple[int, int]


def depth(leaves: int) -> int:
    """The level of the root.

    >>> [depth(leaves) for leaves in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (leaves - 1).bit_length()


def leaves_of(nodes: Iterable[Node], leaves: int) -> frozenset[int]:
    """All leaves below some nodes.

    >>> sorted(leaves_of([(1, 1), (0, 4)], leaves=5))
    [2, 3, 4]
    """
    covered = (range(index << level, min((index + 1) << level, leaves)) for level, index in nodes)
    return frozenset(leaf for span in covered for leaf in span)


def put(nodes: dict[Node, Value], node: Node, value: Value, leaves: int, add: Callable[[Value, Value], Value]) -> None:
    """Add a node to those that are there, and sum up every pair of siblings that has become complete.

    Args:
        nodes: changed in place; holds no two siblings before and after.
        node: not covered by `nodes` yet.
        value: its sum.
        leaves: of the whole tree. What lies behind its last leaf counts as nothing.
        add: the sum of two values, the left one first; it may change that one in place.
    """
    level, index = node
    while level < depth(leaves):
        sibling = (level, index ^ 1)
        is_void = (index ^ 1) << level >= leaves
        if sibling not in nodes and not is_void:
            break
        if not is_void:
            other = nodes.pop(sibling)
            value = add(value, other) if index % 2 == 0 else add(other, value)
        level, index = level + 1, index // 2
    nodes[level, index] = value


def total(nodes: Iterable[tuple[Node, Value]], leaves: int, add: Callable[[Value, Value], Value]) -> Value:
    """The sum of the whole tree from nodes that cover every leaf once, in any order; ValueError if they do not."""
    merged: dict[Node, Value] = {}
    for node, value in nodes:
        put(merged, node, value, leaves, add)
    root = (depth(leaves), 0)
    if set(merged) != {root}:
        missing = sorted(frozenset(range(leaves)) - leaves_of(merged, leaves))
        raise ValueError(f"not every leaf of {leaves} is there once; missing: {missing}")
    return merged[root]
