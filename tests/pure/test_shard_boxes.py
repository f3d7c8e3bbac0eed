"""Boxes against a mask of every element, and the split of replicated tensors over ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.format.regions import Extent, Region, split_replicated, uncovered

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(
        offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    )


@st.composite
def shapes_with_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), min_size=2, max_size=6))


@st.composite
def states(draw: st.DrawFn) -> list[Extent]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=6))
    return [Extent(f"t{number}", shape, draw(st.sampled_from([1, 2, 4, 16]))) for number, shape in enumerate(shapes)]


def mask(shape: tuple[int, ...], regions: list[Region]) -> npt.NDArray[np.int64]:
    counts = np.zeros(shape, dtype=np.int64)
    for region in regions:
        counts[region.within(Region.whole(shape))] += 1
    return counts


@given(shapes_with_boxes())
def test_an_intersection_is_what_both_masks_have(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (first, second, *_) = case
    common = first.intersection(second)
    expected = mask(shape, [first]) * mask(shape, [second])
    assert np.array_equal(mask(shape, [common] if common else []), expected)
    assert common is None or common.numel == expected.sum()


@given(shapes_with_boxes())
def test_uncovered_is_what_no_piece_has_and_each_element_once(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (wanted, *pieces) = case
    expected = mask(shape, [wanted]) * (mask(shape, pieces) == 0)
    assert np.array_equal(mask(shape, uncovered(wanted, pieces)), expected)


@given(shapes_with_boxes())
def test_a_box_within_another_selects_the_same_elements(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (outer, other, *_) = case
    inner = outer.intersection(other)
    if inner is None:
        return
    whole = np.arange(math.prod(shape)).reshape(shape)
    held = whole[outer.within(Region.whole(shape))]
    assert np.array_equal(held[inner.within(outer)], whole[inner.within(Region.whole(shape))])


@given(shapes_with_boxes())
def test_a_box_fits_where_it_was_drawn_and_not_in_less(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (region, *_) = case
    assert region.fits_into(shape)
    assert not region.fits_into((*shape, 1))
    for d in range(len(shape)):
        end = region.offsets[d] + region.sizes[d]
        assert not region.fits_into((*shape[:d], end - 1, *shape[d + 1 :]))


@given(states(), st.integers(1, 9))
def test_a_split_covers_every_element_exactly_once(extents: list[Extent], world_size: int) -> None:
    shares = split_replicated(extents, world_size)
    assert len(shares) == world_size
    for extent in extents:
        parts = [share[extent.name] for share in shares if extent.name in share]
        assert parts, f"nobody writes {extent.name}"
        assert (mask(extent.shape, parts) == 1).all()
    assert {name for share in shares for name in share} == {extent.name for extent in extents}


@given(states(), st.integers(1, 9))
def test_each_rank_writes_its_share_within_one_row(extents: list[Extent], world_size: int) -> None:
    by_name = {extent.name: extent for extent in extents}
    total = sum(math.prod(extent.shape) * extent.item_bytes for extent in extents)
    row = 0  # bytes of the longest row: what a cut can be rounded by, half of it at each end
    for extent in extents:
        rows = next((size for size in extent.shape if size > 1), 1)
        row = max(row, math.prod(extent.shape) * extent.item_bytes // rows)
    for share in split_replicated(extents, world_size):
        written = sum(region.numel * by_name[name].item_bytes for name, region in share.items())
        assert abs(written - total / world_size) <= row + 1  # cuts are whole bytes


@given(states(), st.integers(1, 9))
def test_each_part_is_contiguous_in_memory(extents: list[Extent], world_size: int) -> None:
    for share in split_replicated(extents, world_size):
        for extent in extents:
            region = share.get(extent.name)
            if region is not None:
                part = np.empty(extent.shape)[region.within(Region.whole(extent.shape))]
                assert part.flags.c_contiguous


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_rank_at_all_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}"):
        split_replicated([], world_size)
