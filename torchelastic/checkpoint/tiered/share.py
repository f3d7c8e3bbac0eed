"""Which part of a state this rank writes, and the tensors to copy for it, save after save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic.checkpoint.shards.boxes import Box, Extent, split_replicated
from torchelastic.checkpoint.shards.header import Entry, Header, place
from torchelastic.checkpoint.shards.recall import Outline, outline_of, recall
from torchelastic.checkpoint.shards.tree import Flat, NamedTensor, Plain, flatten

#: Which of the tensors of these names every rank holds with the same bits.
Replicated = Callable[[Sequence[str]], Collection[str]]


@dataclass(frozen=True)
class TreeShare:
    """What one rank writes of one state.

    Attributes:
        structure: the plain part on rank 0, None on the others.
        entries: the tensors, or parts of tensors, in the order of their bytes.
        sources: the tensors to copy; they belong to the state.
    """

    structure: Plain
    entries: tuple[Entry, ...]
    sources: Sequence[torch.Tensor]

    def header(self, meta: Mapping[str, Any]) -> Header:
        """The header of the shard, its checksums still to come."""
        return Header(self.structure, self.entries, meta)


@dataclass(frozen=True)
class _Pick:
    """One tensor of the share: its place in the list of all, and which part of it; None: the whole."""

    place: int
    part: tuple[slice, ...] | None


def parts_of_rank(flat: Flat, replicated: Replicated, rank: int, world_size: int) -> list[NamedTensor]:
    """The tensors, or parts of them, that a rank writes. Pure.

    What every rank holds alike is split evenly; of what is marked as a part (`ShardOf`, DTensor) each rank writes its
    own; the rest is rank 0's.

    Args:
        flat: the state on this rank; the replicated tensors must be the same list on all ranks.
        replicated: which of some names are of tensors that every rank holds with the same bits.
        rank: of the group that saves.
        world_size: its size.
    """
    alike = set(replicated([named.name for named in flat.tensors if not named.is_shard]))
    extents = [
        Extent(named.name, named.shape, named.tensor.element_size()) for named in flat.tensors if named.name in alike
    ]
    boxes = split_replicated(extents, world_size)[rank]
    parts = []
    for named in flat.tensors:
        if named.name in alike:
            box = boxes.get(named.name)
            if box is not None:
                tensor = named.tensor[box.within(Box.whole(named.shape))]
                parts.append(NamedTensor(named.name, tensor, named.shape, box))
        elif named.is_shard or rank == 0:
            parts.append(named)
    return parts


class Sharing:
    """Takes the share of one rank out of a state again and again; used on the training thread.

    Args:
        allow_pickles: see `flatten`.
    """

    def __init__(self, *, allow_pickles: bool = False) -> None:
        self._allow_pickles = allow_pickles
        self._outline: Outline | None = None
        self._group: tuple[int, int] = (-1, 0)
        self._picks: list[_Pick] = []
        self._entries: tuple[Entry, ...] = ()

    def take(self, tree: Any, replicated: Replicated, rank: int, world_size: int) -> TreeShare:
        """The share of now; copies nothing.

        Raises:
            TypeError: the state holds something that is not saved; see `flatten`.
        """
        if self._outline is not None and self._group == (rank, world_size):
            recalled = recall(tree, self._outline, allow_pickles=self._allow_pickles)
            if recalled is not None:
                structure, tensors = recalled
                sources = [_part(tensors[pick.place], pick.part) for pick in self._picks]
                return TreeShare(structure if rank == 0 else None, self._entries, sources)
        return self._take_anew(tree, replicated, rank, world_size)

    def _take_anew(self, tree: Any, replicated: Replicated, rank: int, world_size: int) -> TreeShare:
        flat = flatten(tree, allow_pickles=self._allow_pickles)
        parts = parts_of_rank(flat, replicated, rank, world_size)
        places = {named.name: number for number, named in enumerate(flat.tensors)}
        self._picks = [_Pick(places[part.name], _slices(part, flat.tensors[places[part.name]])) for part in parts]
        self._entries = place(parts)
        self._group = (rank, world_size)
        self._outline = outline_of(flat)
        return TreeShare(flat.structure if rank == 0 else None, self._entries, [part.tensor for part in parts])


def _slices(part: NamedTensor, whole: NamedTensor) -> tuple[slice, ...] | None:
    return None if part.box == whole.box else part.box.within(whole.box)


def _part(tensor: torch.Tensor, part: tuple[slice, ...] | None) -> torch.Tensor:
    return tensor if part is None else tensor.detach()[part]
