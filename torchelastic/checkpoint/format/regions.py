"""Pure: which part of a tensor a piece holds, how a tensor is split over ranks, and how pieces cover it again.

A piece is addressed by the name of its tensor and by a region: where it begins and how long it is in each dimension. So
what was saved by one number of ranks can be read by any other: regions count from the beginning of the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

#: A length or a place in JSON that somebody else may have written: torch counts them in 64 bits with a sign.
Length = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A block of a tensor: `offsets[d] .. offsets[d] + sizes[d]` in each dimension d; a scalar has no dimension."""

    offsets: tuple[Length, ...]
    sizes: tuple[Length, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min(self.offsets + self.sizes, default=0) < 0:
            raise ValueError(f"{self.offsets} and {self.sizes} are no region: as many offsets as sizes, none negative")

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Region:
        """The region of a whole tensor.

        >>> Region.whole((2, 3))
        Region(offsets=(0, 0), sizes=(2, 3))
        """
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)

    def fits_into(self, shape: Sequence[int]) -> bool:
        """Whether it lies within a tensor of this shape."""
        if shape == self.sizes and not any(self.offsets):
            return True  # all of it, as most are: a shard may have thousands
        return len(shape) == len(self.sizes) and all(
            offset + size <= length for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersection(self, other: Region) -> Region | None:
        """What both hold; None where that is nothing.

        >>> Region((0,), (4,)).intersection(Region((3,), (4,)))
        Region(offsets=(3,), sizes=(1,))
        """
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self._ends, other._ends))
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Region(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The index of this region in a tensor that holds `outer` (which contains it)."""
        return tuple(
            slice(offset - origin, offset - origin + size)
            for offset, size, origin in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def uncovered(wanted: Region, pieces: Iterable[Region]) -> list[Region]:
    """The parts of a region that no piece holds; empty when it can be put together.

    >>> uncovered(Region((0,), (4,)), [Region((0,), (1,)), Region((2,), (2,))])
    [Region(offsets=(1,), sizes=(1,))]
    """
    missing = [wanted] if wanted.numel else []
    for piece in pieces:
        missing = list(itertools.chain.from_iterable(_without(region, piece) for region in missing))
    return missing


def _without(region: Region, piece: Region) -> list[Region]:
    """What is left of a region when a piece is cut out of it: up to two slabs per dimension."""
    common = region.intersection(piece)
    if common is None:
        return [region]
    left: list[Region] = []
    offsets, sizes = list(region.offsets), list(region.sizes)
    for d in range(len(sizes)):
        for begin, end in (
            (offsets[d], common.offsets[d]),
            (common.offsets[d] + common.sizes[d], offsets[d] + sizes[d]),
        ):
            if end > begin:
                left.append(
                    Region((*offsets[:d], begin, *offsets[d + 1 :]), (*sizes[:d], end - begin, *sizes[d + 1 :]))
                )
        offsets[d], sizes[d] = common.offsets[d], common.sizes[d]
    return left


@dataclass(frozen=True)
class Extent:
    """What the planner must know of a tensor that every rank holds: its name, shape and bytes per element."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int


def split_replicated(extents: Sequence[Extent], world_size: int) -> list[dict[str, Region]]:
    """Says which part of replicated tensors each rank writes, so that each writes about 1/N of the bytes.

    All tensors are laid on one line and the line is cut into equal parts, each cut rounded to a row of the tensor's
    first dimension that is longer than 1: so every part is contiguous in memory, and a rank's share is off by one row
    at most. Every rank computes the same answer from the same list.

    Args:
        extents: the tensors, in an order that is equal on all ranks.
        world_size: how many ranks write.

    Returns:
        Per rank: the region of each tensor of which it writes a part. What has no elements is written by rank 0.

    Raises:
        ValueError: world_size is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: it must be at least 1")
    total_bytes = sum(math.prod(extent.shape) * extent.item_bytes for extent in extents)
    shares: list[dict[str, Region]] = [{} for _ in range(world_size)]
    position = 0
    for extent in extents:
        rows, dimension = _rows(extent.shape)
        row_bytes = math.prod(extent.shape) * extent.item_bytes // rows if rows else 0
        cuts = [_cut(total_bytes * rank // world_size - position, row_bytes, rows) for rank in range(world_size + 1)]
        cuts[0], cuts[-1] = 0, rows
        for rank, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if end > begin or (rank == 0 and not rows):
                shares[rank][extent.name] = _slab(extent.shape, dimension, begin, end)
        position += row_bytes * rows
    return shares


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows a tensor has, and along which dimension; a scalar is one row along none (-1)."""
    if 0 in shape:
        return 0, -1
    dimension = next((d for d, size in enumerate(shape) if size > 1), -1)
    return (shape[dimension] if dimension >= 0 else 1), dimension


def _cut(offset_bytes: int, row_bytes: int, rows: int) -> int:
    if row_bytes == 0:
        return rows
    return min(max((2 * offset_bytes + row_bytes) // (2 * row_bytes), 0), rows)


def _slab(shape: tuple[int, ...], dimension: int, begin: int, end: int) -> Region:
    if dimension < 0:
        return Region.whole(shape)
    offsets = tuple(begin if d == dimension else 0 for d in range(len(shape)))
    return Region(offsets, tuple(end - begin if d == dimension else size for d, size in enumerate(shape)))
