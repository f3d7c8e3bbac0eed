"""From a state to the entries of a rank's shard, save after save: what is as last time is not worked out anew.

Between two saves of a training run the values of tensors change, a few numbers too, and nothing else. So names, places
and layout are those of the save before, and only the numbers are encoded again; see `cached_tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from torchelastic.checkpoint.format.cached_tree import CachedTree, cached_tree_of, flatten_again
from torchelastic.checkpoint.format.header import Entry, Header, place
from torchelastic.checkpoint.format.regions import Extent, Region, split_replicated
from torchelastic.checkpoint.format.tree import Flat, NamedTensor, flatten

#: Picks among the names of a state's tensors.
Choice = Callable[[Sequence[str]], Collection[str]]


def none_of(names: Sequence[str]) -> Collection[str]:  # noqa: ARG001 - a `Choice`
    """Picks none."""
    return ()


@dataclass(frozen=True)
class _Pick:
    """One tensor of the share: its place in the list of all, and how to index it; None: the whole."""

    place: int
    part: tuple[slice | None, ...] | None


def parts_of_rank(
    flat: Flat, replicated: Choice, rank: int, world_size: int, *, own: Choice = none_of
) -> list[NamedTensor]:
    """The tensors, or parts of them, that a rank writes. Pure.

    What every rank holds alike is split evenly; of what is marked as a part (`ShardOf`, DTensor) each rank writes its
    own; of what each rank has its own it writes one row of a tensor with a row for each; the rest is rank 0's.

    Args:
        flat: the state on this rank; the replicated tensors must be the same list on all ranks.
        replicated: which of some names are of tensors that every rank holds with the same bits.
        rank: of the group that saves.
        world_size: its size.
        own: which of some names are of tensors, of one shape, of which each rank has its own.
    """
    unmarked = [named.name for named in flat.tensors if not named.is_shard]
    alike, rows = set(replicated(unmarked)), set(own(unmarked))
    extents = [
        Extent(named.name, named.shape, named.tensor.element_size()) for named in flat.tensors if named.name in alike
    ]
    regions = split_replicated(extents, world_size)[rank]
    parts = []
    for named in flat.tensors:
        if named.name in alike:
            region = regions.get(named.name)
            if region is not None:
                tensor = named.tensor[region.within(Region.whole(named.shape))]
                parts.append(NamedTensor(named.name, tensor, named.shape, region))
        elif named.name in rows:
            parts.append(_row(named, rank, world_size))
        elif named.is_shard or rank == 0:
            parts.append(named)
    return parts


def _row(named: NamedTensor, rank: int, world_size: int) -> NamedTensor:
    place = Region((rank, *(0 for _ in named.shape)), (1, *named.shape))
    return NamedTensor(named.name, named.tensor[None], (world_size, *named.shape), place, is_shard=True)


class RecurringLayout:
    """Lays out what one rank saves of a state; used by one thread, one object per state that is saved repeatedly.

    It keeps no tensor alive.

    Args:
        allow_pickles: see `flatten`.
    """

    def __init__(self, *, allow_pickles: bool | None = False) -> None:
        self._allow_pickles = allow_pickles
        self._cached: CachedTree | None = None
        self._group = (-1, 0)
        self._picks: list[_Pick] | None = None  # None: all tensors, as they are
        self._entries: tuple[Entry, ...] = ()

    def lay_out(
        self,
        tree: Any,
        meta: Mapping[str, Any],
        *,
        replicated: Choice = none_of,
        own: Choice = none_of,
        rank: int = 0,
        world_size: int = 1,
    ) -> tuple[Header, list[torch.Tensor]]:
        """Returns the layout of a rank's shard and the tensors to copy, in the order of its entries.

        While the state keeps its form, the entries are the same object each time, so that `Stage.fits` is quick. The
        plain part of the state is in the header of rank 0. Where each rank has a state of its own, it is its rank 0.

        Args:
            tree: the state; nothing in it is changed or copied.
            meta: see `Header`.
            replicated: what is split over the ranks, see `parts_of_rank`.
            own: see there.
            rank: of the group that saves this state together.
            world_size: its size.

        Raises:
            TypeError, ValueError: as `flatten`.
        """
        if self._cached is not None and self._group == (rank, world_size):
            again = flatten_again(tree, self._cached, allow_pickles=self._allow_pickles)
            if again is not None:
                structure, tensors = again
                sources = list(tensors) if self._picks is None else [_picked(tensors, pick) for pick in self._picks]
                return self._header(structure, meta), sources
        flat = flatten(tree, allow_pickles=self._allow_pickles)
        parts = parts_of_rank(flat, replicated, rank, world_size, own=own)
        places = {named.name: number for number, named in enumerate(flat.tensors)}
        picks = [_Pick(places[part.name], _slices(part, flat.tensors[places[part.name]])) for part in parts]
        is_all = picks == [_Pick(number, None) for number in range(len(flat.tensors))]
        self._picks, self._entries = None if is_all else picks, place(parts)
        self._group, self._cached = (rank, world_size), cached_tree_of(flat)
        return self._header(flat.structure, meta), [part.tensor for part in parts]

    def _header(self, structure: Any, meta: Mapping[str, Any]) -> Header:
        return Header(structure if self._group[0] == 0 else None, self._entries, MappingProxyType(dict(meta)))


def _slices(part: NamedTensor, whole: NamedTensor) -> tuple[slice | None, ...] | None:
    if len(part.shape) > len(whole.shape):
        return (None,)
    return None if part.region == whole.region else part.region.within(whole.region)


def _picked(tensors: Sequence[torch.Tensor], pick: _Pick) -> torch.Tensor:
    tensor = tensors[pick.place]
    return tensor if pick.part is None else tensor.detach()[pick.part]
