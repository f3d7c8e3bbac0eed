"""Which part of a state each rank writes, and taking the same state apart again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.format.header import NO_CHECKSUM, Header
from torchelastic.checkpoint.format.layout import RecurringLayout, parts_of_rank
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import dtype_name
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.shards import ShardOf, unflatten


def weights(names: Sequence[str]) -> Collection[str]:
    return [name for name in names if name.startswith("weights/")]


def make_tree(fill: float = 0.0) -> dict[str, Any]:
    return {
        "weights": OrderedDict(a=torch.full((8, 3), fill), b=torch.full((5,), fill), c=torch.full((), fill)),
        "own": [torch.full((2,), fill), {"x": (1, fill)}],
        "step": int(fill),
    }


def take(
    layout: RecurringLayout, tree: Any, rank: int = 0, world_size: int = 1
) -> tuple[Header, Sequence[torch.Tensor]]:
    return layout.lay_out(tree, {}, replicated=weights, rank=rank, world_size=world_size)


def taken(layout: RecurringLayout, tree: Any) -> Any:
    """The tree that the copied tensors of a rank alone make."""
    header, sources = take(layout, tree)
    for entry, source in zip(header.entries, sources, strict=True):
        assert (entry.region.sizes, entry.dtype) == (tuple(source.shape), dtype_name(source.dtype)), "it fits its place"
    copies = {entry.name: source.detach().clone() for entry, source in zip(header.entries, sources, strict=True)}
    return unflatten(header.structure, copies)


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_shares_of_all_ranks_are_each_element_once(world_size: int) -> None:
    tree = make_tree(3.0)
    flat = flatten(tree)
    counted = {named.name: torch.zeros(named.shape) for named in flat.tensors}
    for rank in range(world_size):
        for part in parts_of_rank(flat, weights, rank, world_size):
            place = part.region.within(Region.whole(part.shape))
            counted[part.name][place] += 1
            assert tuple(part.tensor.shape) == part.region.sizes
    assert all(bool((count == 1).all()) for count in counted.values()), counted


def test_what_is_not_replicated_is_rank_0s_and_what_is_a_part_is_each_ranks_own() -> None:
    tree = {"weights": {"a": torch.ones(4)}, "own": torch.ones(2), "part": ShardOf(torch.ones(3), (6,), (3,))}
    names = {rank: [part.name for part in parts_of_rank(flatten(tree), weights, rank, 2)] for rank in (0, 1)}
    assert names == {0: ["weights/a", "own", "part"], 1: ["weights/a", "part"]}


def test_only_rank_0_writes_the_plain_values() -> None:
    (first, _), (second, _) = (take(RecurringLayout(), make_tree(), rank, 2) for rank in (0, 1))
    assert first.structure is not None
    assert second.structure is None


# --- again and again --------------------------------------------------------------------------------------------------


def test_a_second_share_has_the_values_of_now_and_the_entries_of_before() -> None:
    layout = RecurringLayout()
    first, _ = take(layout, make_tree(1.0), 0, 2)
    tree = make_tree(2.0)  # other tensor objects, other plain values
    second, sources = take(layout, tree, 0, 2)
    assert second.entries is first.entries, "nothing was laid out anew"
    assert all(bool((source == 2.0).all()) for source in sources)
    assert taken(layout, make_tree(5.0))["own"][1] == {"x": (1, 5.0)}
    assert {entry.checksum for entry in second.entries} == {NO_CHECKSUM}


def test_another_group_gets_other_shares() -> None:
    layout = RecurringLayout()
    of_two, _ = take(layout, make_tree(), 0, 2)
    of_one, _ = take(layout, make_tree())
    assert sum(entry.size_bytes for entry in of_one.entries) > sum(entry.size_bytes for entry in of_two.entries)
